//! Faults of the network are rules, asked for every frame and every connection.

use paramill_core::types::{NodeId, Time};
use paramill_core::wire::Header;
use std::time::Duration;

/// A frame as rules and observers see it.
#[derive(Debug, Clone, Copy)]
pub struct FrameView<'a> {
    /// Virtual time.
    pub now: Time,
    /// Sender.
    pub from: NodeId,
    /// Receiver.
    pub to: NodeId,
    /// The frame's header.
    pub header: &'a Header,
    /// Its payload, without padding.
    pub payload: &'a [u8],
}

/// What a rule does to a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Pass,
    /// It arrives later by this much, and so does everything behind it on its connection.
    Deliver(Duration),
    /// It arrives later by this much; what is sent after it on its connection may overtake it.
    Late(Duration),
    /// The connection breaks: this frame and everything under way on it is lost, both ends are told.
    Reset,
}

/// A rule of the network. No method is required; each default lets everything pass.
///
/// A rule MUST decide from its arguments and its own seeded state alone. When several rules concern a frame, a
/// reset outweighs delays and delays add up; one of the whole connection makes the sum a delay of the whole connection.
pub trait Rule: std::fmt::Debug {
    /// Asked when a frame is sent.
    fn on_frame(&mut self, frame: &FrameView<'_>) -> Verdict {
        let _ = frame;
        Verdict::Pass
    }

    /// Asked when a connection is opened; an answer is the reason why it fails.
    fn on_connect(&mut self, now: Time, from: NodeId, to: NodeId) -> Option<String> {
        let _ = (now, from, to);
        None
    }
}

/// All rules of a network, as one.
#[derive(Debug, Default)]
pub struct RuleSet {
    rules: Vec<Box<dyn Rule>>,
}

impl RuleSet {
    /// Adds a rule.
    pub fn add(&mut self, rule: impl Rule + 'static) {
        self.rules.push(Box::new(rule));
    }

    /// Takes all rules away: the network is healed.
    pub fn clear(&mut self) {
        self.rules.clear();
    }

    pub(crate) fn on_frame(&mut self, frame: &FrameView<'_>) -> Verdict {
        let mut sum = Verdict::Pass;
        for rule in &mut self.rules {
            sum = match (sum, rule.on_frame(frame)) {
                (_, Verdict::Reset) => return Verdict::Reset,
                (sum, Verdict::Pass) => sum,
                (Verdict::Pass | Verdict::Reset, only) => only,
                (Verdict::Late(one), Verdict::Late(other)) => Verdict::Late(one + other),
                (
                    Verdict::Late(one) | Verdict::Deliver(one),
                    Verdict::Late(other) | Verdict::Deliver(other),
                ) => Verdict::Deliver(one + other),
            };
        }
        sum
    }

    pub(crate) fn on_connect(&mut self, now: Time, from: NodeId, to: NodeId) -> Option<String> {
        self.rules.iter_mut().find_map(|rule| rule.on_connect(now, from, to))
    }
}
