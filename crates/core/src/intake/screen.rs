//! Screening of gradients for NaN and Inf.

use crate::codec::Content;
use crate::kernels;
use crate::policy::NonFinite;

/// Looks for NaN and Inf, and does what the table's policy says.
#[derive(Debug, Default)]
pub(super) struct FiniteScreen {
    rule: NonFinite,
    /// Frames that had some.
    found: u64,
    clipped: Vec<f32>,
}

/// A screen's verdict on values.
#[derive(Debug, PartialEq)]
pub(super) enum Screened<'a> {
    Finite,
    /// The same values with zeros in the place of NaN and Inf.
    Clipped(&'a [f32]),
    Refused,
}

impl FiniteScreen {
    pub(super) fn new(rule: NonFinite) -> FiniteScreen {
        FiniteScreen { rule, ..FiniteScreen::default() }
    }

    pub(super) fn set_rule(&mut self, rule: NonFinite) {
        self.rule = rule;
    }

    pub(super) fn found(&self) -> u64 {
        self.found
    }

    pub(super) fn set_found(&mut self, found: u64) {
        self.found = found;
    }

    #[inline]
    pub(super) fn check(&mut self, content: Content<'_>) -> Screened<'_> {
        if content.all_finite() { Screened::Finite } else { self.judge(content) }
    }

    #[cold]
    fn judge(&mut self, content: Content<'_>) -> Screened<'_> {
        self.found += 1;
        if self.rule == NonFinite::Reject {
            return Screened::Refused;
        }
        self.clipped.resize(content.len(), 0.0);
        content.copy_to(&mut self.clipped);
        kernels::clip_non_finite(&mut self.clipped);
        Screened::Clipped(&self.clipped)
    }
}
