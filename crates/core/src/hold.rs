//! The hold axis: which updates a worker sends, and which it holds back and merges with later ones (adaptive transmission).
//!
//! A worker accumulates the gradients of a table that it has not sent: their sum is the *update*. Before each push a [`Criterion`]
//! looks at the update's size, and says whether it is worth sending. One that is held back is sent with the next gradients, at the
//! latest with the [`Hold::most`]th push after the one that its oldest gradient was meant for; the push of the iteration then has no gradient, and counts
//! for the worker's progress all the same. A worker that holds its update back does not ask for parameters either, unless
//! [`Hold::holds_pulls`] says otherwise: where its own gradients change little, those of others likely do too. After the adaptive
//! communication of MPS (section 2.3.1), Gaia's significance, and variance-based compression.
//!
//! The unit of a dense table is the table, and that of a table of rows the row.

mod none;
mod significance;
mod variance;
mod when;

use crate::registry::{Axis, Param};
use crate::spec::{Spec, SpecError};
use crate::types::Clock;
use std::fmt;
use std::ops::RangeInclusive;

/// The text of a job whose workers hold nothing back.
pub const NONE: &str = "none";

const MOST: RangeInclusive<u64> = 1..=1_000_000;
const MOST_BY_DEFAULT: u64 = 8;

/// Parameters that every criterion takes.
const COMMON: &[Param] = &[
    Param {
        name: "most",
        default: Some("8"),
        about: "Pushes from which a gradient is held back at most, usually one in each iteration; 1 to 1000000.",
    },
    Param {
        name: "pulls",
        default: Some("on"),
        about: "Whether a worker that holds an update back does not ask for parameters either: `on` or `off`.",
    },
];

/// When an update is held back. One method is required.
pub trait Criterion: Send + Sync + fmt::Debug {
    /// Whether this update is held back for now. MUST follow from the argument alone.
    fn holds(&self, update: &UpdateView) -> bool;

    /// Whether it looks at [`UpdateView::squared_parameters`], which then have to be measured.
    fn needs_parameters(&self) -> bool {
        true
    }

    /// Whether it holds nothing back whatever the update is: nothing is measured then.
    fn holds_nothing(&self) -> bool {
        false
    }
}

/// An update as a criterion sees it: the sum of the gradients of a table, or of a row, that were not sent, with the newest one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UpdateView {
    /// `|u|^2`.
    pub squared_norm: f64,
    /// `|w|^2` of the parameters that the worker has; 0 where they are not known, or not asked for.
    pub squared_parameters: f64,
    /// The sum of `|g|^2` over its gradients.
    pub sum_of_squares: f64,
    /// Pushes since the one that its oldest gradient was meant for.
    pub held: u64,
    /// The iteration.
    pub clock: Clock,
}

impl UpdateView {
    /// `|u| / |w|`. Any update of parameters that are zero is infinitely significant, and none is not at all.
    pub fn significance(&self) -> f64 {
        if self.squared_norm == 0.0 { 0.0 } else { (self.squared_norm / self.squared_parameters).sqrt() }
    }

    /// `|u|^2` over the sum of `|g|^2`: about 1 where gradients are unrelated, less where they cancel each other out, and their number
    /// where they agree.
    pub fn coherence(&self) -> f64 {
        if self.squared_norm == 0.0 { 0.0 } else { self.squared_norm / self.sum_of_squares }
    }
}

/// The policy `hold` of a table: `significance:0.01,most=8,pulls=on`.
#[derive(Debug)]
pub struct Hold {
    criterion: Box<dyn Criterion>,
    most: u64,
    pulls: Option<bool>,
    text: String,
}

impl Hold {
    /// Reads the text form; `none` holds nothing back.
    pub fn parse(axis: &Axis<dyn Criterion>, text: &str) -> Result<Option<Hold>, SpecError> {
        let mut spec = Spec::parse(text)?;
        let text = spec.to_string();
        let most: Option<u64> = spec.take_parsed("most", "a number of pushes")?;
        let pulls = match spec.take("pulls").as_deref() {
            None => None,
            Some("on") => Some(true),
            Some("off") => Some(false),
            Some(other) => {
                return Err(spec.parameter_error(format!("`pulls={other}`: expected on or off")));
            }
        };
        let (least, largest) = (MOST.start(), MOST.end());
        spec.require(most.is_none_or(|most| MOST.contains(&most)), || {
            format!("most = {}: expected {least} to {largest} pushes", most.unwrap_or_default())
        })?;
        let criterion = axis.build(&spec)?;
        if criterion.holds_nothing() {
            spec.require(most.is_none() && pulls.is_none(), || {
                "`most` and `pulls` are for updates that are held back: leave them out".into()
            })?;
            return Ok(None);
        }
        Ok(Some(Hold { criterion, most: most.unwrap_or(MOST_BY_DEFAULT), pulls, text }))
    }

    /// Whether an update is held back: the criterion says so, and its bound allows it.
    pub fn holds(&self, update: &UpdateView) -> bool {
        update.held < self.most && self.criterion.holds(update)
    }

    /// Whether updates are compared with the parameters.
    pub fn needs_parameters(&self) -> bool {
        self.criterion.needs_parameters()
    }

    /// Pushes from which a gradient is held back at most.
    pub fn most(&self) -> u64 {
        self.most
    }

    /// Whether a worker that holds an update back does not ask for parameters either.
    pub fn holds_pulls(&self) -> bool {
        self.pulls.unwrap_or(true)
    }

    /// Whether `pulls=on` is written down, and not only a default.
    pub fn asks_to_hold_pulls(&self) -> bool {
        self.pulls == Some(true)
    }
}

/// The text form: parsing it gives an equal policy.
impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The choices of this axis.
pub fn axis() -> Axis<dyn Criterion> {
    let entries = vec![none::ENTRY, significance::ENTRY, variance::ENTRY, when::ENTRY];
    Axis::new("criterion of held updates", COMMON, entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(text: &str) -> Hold {
        Hold::parse(&axis(), text).unwrap().expect("it holds something back")
    }

    /// Of 16 gradients of norm 1, with parameters of norm 10.
    fn update(norm: f64, held: u64) -> UpdateView {
        let (squared_norm, squared_parameters) = (norm * norm, 100.0);
        UpdateView { squared_norm, squared_parameters, sum_of_squares: 16.0, held, clock: 99 }
    }

    #[test]
    fn an_update_is_held_back_until_the_criterion_lets_it_go() {
        for (text, held, sent) in [
            ("significance:0.25", 2.4, 2.6),
            ("significance:theta=0.25", 2.4, 2.6),
            // Gradients that have nothing in common add up to 4, those that agree to 16.
            ("variance:2", 5.6, 5.7),
            ("variance:alpha=4", 7.9, 8.0),
            ("when:significance < 0.25", 2.4, 2.5),
            ("when:condition=coherence <= min(2, 3)", 5.6, 5.7),
            ("when:norm < 30 / sqrt(clock + 1)", 2.9, 3.1),
        ] {
            let hold = hold(text);
            assert_eq!([held, sent].map(|norm| hold.holds(&update(norm, 1))), [true, false], "{text}");
        }
    }

    /// What the trait asks of every criterion, registered here or elsewhere.
    #[test]
    fn every_criterion_follows_from_the_update_alone_and_keeps_its_bound() {
        for entry in axis().entries() {
            let parse = || Hold::parse(&axis(), entry.example).unwrap_or_else(|error| panic!("{error}"));
            let Some(hold) = parse() else {
                assert_eq!(entry.name, NONE);
                continue;
            };
            let again = parse().expect("the same text");
            for norm in [0.0, 1e-20, 0.3, 3.0, 16.0, 1e20, f64::INFINITY] {
                let holds = |hold: &Hold, held| hold.holds(&update(norm, held));
                assert_eq!(holds(&hold, 1), holds(&again, 1), "{}", entry.example);
                assert!(!holds(&hold, hold.most()) && !holds(&hold, u64::MAX), "{}", entry.example);
            }
        }
    }

    #[test]
    fn nothing_is_held_back_longer_than_the_bound() {
        for (text, most) in [("significance:1e9", 8), ("variance:1e9,most=3", 3), ("when:true,most=1", 1)] {
            let hold = hold(text);
            assert_eq!(hold.most(), most);
            assert!(hold.holds(&update(1.0, most - 1)) && !hold.holds(&update(1.0, most)), "{text}");
        }
    }

    #[test]
    fn parameters_that_are_zero_are_significantly_changed_by_anything_but_zero() {
        let view = |squared_norm| UpdateView { squared_norm, squared_parameters: 0.0, ..update(1.0, 0) };
        let hold = hold("significance:1000");
        assert!(!hold.holds(&view(1e-30)) && hold.holds(&view(0.0)));
    }

    #[test]
    fn the_text_form_says_what_holds() {
        for text in ["significance:0.01", "significance:0.01,most=4,pulls=off", "when:held < 3,pulls=on"] {
            assert_eq!(hold(text).to_string(), text);
        }
        assert!(Hold::parse(&axis(), "none").unwrap().is_none());
        let pulls = |text: &str| (hold(text).holds_pulls(), hold(text).asks_to_hold_pulls());
        assert_eq!(pulls("variance:2"), (true, false));
        assert_eq!(pulls("variance:2,pulls=on"), (true, true));
        assert_eq!(pulls("variance:2,pulls=off"), (false, false));
    }

    #[test]
    fn wrong_text_says_what_was_expected() {
        for (text, expected) in [
            (
                "gaia:0.01",
                "unknown criterion of held updates `gaia`; known: none, significance, variance, when",
            ),
            ("significance", "missing field `theta`"),
            ("significance:0", "theta = 0: expected a number above 0"),
            ("significance:nan", "theta = NaN: expected a number above 0"),
            ("variance:1", "alpha = 1: expected a number above 1"),
            ("variance:2,most=0", "most = 0: expected 1 to 1000000 pushes"),
            ("variance:2,most=often", "`most=often`: expected a number of pushes"),
            ("variance:2,pulls=yes", "`pulls=yes`: expected on or off"),
            ("none:most=3", "leave them out"),
            ("none:3", "`3` is given without a name"),
            ("when:n > 3", "in the condition `n > 3`, at character 1: `n` is not known here"),
            ("when", "missing field `condition`"),
        ] {
            let error = Hold::parse(&axis(), text).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
