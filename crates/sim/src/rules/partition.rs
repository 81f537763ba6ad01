use crate::rule::{FrameView, Rule};
use paramill_core::fault::{Delay, Fate};
use paramill_core::types::{NodeId, Time};

/// Cuts some nodes off from all others for a time.
///
/// Connections do not break: as with TCP, what is sent arrives after the partition is over. New connections
/// across it fail.
#[derive(Debug)]
pub struct Partition {
    island: Vec<NodeId>,
    from: Time,
    until: Time,
}

impl Partition {
    /// From `from` until `until`, `island` and the rest of the world do not hear each other.
    pub fn new(island: Vec<NodeId>, from: Time, until: Time) -> Partition {
        Partition { island, from, until }
    }

    fn separates(&self, now: Time, one: NodeId, other: NodeId) -> bool {
        let inside = |node| self.island.contains(&node);
        (self.from..self.until).contains(&now) && inside(one) != inside(other)
    }
}

impl Rule for Partition {
    fn on_frame(&mut self, frame: &FrameView<'_>) -> Fate {
        if self.separates(frame.now, frame.from, frame.to) {
            Fate::Delay(Delay::of_connection(self.until.since(frame.now)))
        } else {
            Fate::Pass
        }
    }

    fn on_connect(&mut self, now: Time, from: NodeId, to: NodeId) -> Option<String> {
        self.separates(now, from, to).then(|| format!("{to} cannot be reached: the network is partitioned"))
    }
}
