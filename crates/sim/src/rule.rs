//! Faults of the network are rules, asked for every frame and every connection.

use paramill_core::fault::{Delay, Fate};
use paramill_core::types::{NodeId, ShardId, Time};
use paramill_core::wire::Header;

/// A frame as rules and observers see it.
#[derive(Debug, Clone, Copy)]
pub struct FrameView<'a> {
    /// Virtual time.
    pub now: Time,
    /// Sender.
    pub from: NodeId,
    /// Receiver.
    pub to: NodeId,
    /// The shard at one end of the connection, or behind the aggregator at one of the ends.
    pub shard: Option<ShardId>,
    /// The frame's header.
    pub header: &'a Header,
    /// Its payload, without padding.
    pub payload: &'a [u8],
}

/// A rule of the network. No method is required; each default lets everything pass.
///
/// A rule MUST decide from its arguments and its own seeded state alone. When several rules concern a frame, a reset
/// outweighs delays; delays of the connection and of the answer add up apart.
pub trait Rule: std::fmt::Debug {
    /// Asked when a frame is sent.
    fn on_frame(&mut self, frame: &FrameView<'_>) -> Fate {
        let _ = frame;
        Fate::Pass
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

    /// Takes all rules away: the network is healed. Frames that are under way keep their delays, and the rest of an answer
    /// that was held back does not overtake its first frames.
    pub fn clear(&mut self) {
        self.rules.clear();
    }

    /// How late a frame is; `None` when its connection breaks.
    pub(crate) fn on_frame(&mut self, frame: &FrameView<'_>) -> Option<Delay> {
        let mut sum = Delay::default();
        for rule in &mut self.rules {
            match rule.on_frame(frame) {
                Fate::Pass => {}
                Fate::Delay(delay) => sum += delay,
                Fate::Reset => return None,
            }
        }
        Some(sum)
    }

    pub(crate) fn on_connect(&mut self, now: Time, from: NodeId, to: NodeId) -> Option<String> {
        self.rules.iter_mut().find_map(|rule| rule.on_connect(now, from, to))
    }
}
