use crate::rule::Rule;
use paramill_core::types::{NodeId, Time};

/// A node takes no new connections for a time; those that stand are left alone.
#[derive(Debug)]
pub struct Closed {
    node: NodeId,
    from: Time,
    until: Time,
}

impl Closed {
    /// From `from` until `until`, nobody can connect to `node`.
    pub fn new(node: NodeId, from: Time, until: Time) -> Closed {
        Closed { node, from, until }
    }
}

impl Rule for Closed {
    fn on_connect(&mut self, now: Time, _from: NodeId, to: NodeId) -> Option<String> {
        let refused = to == self.node && (self.from..self.until).contains(&now);
        refused.then(|| format!("{to} refused the connection"))
    }
}
