use crate::rule::Rule;
use paramill_core::types::{NodeId, Time};

/// Two nodes cannot connect to each other; a connection that stands is left alone.
#[derive(Debug)]
pub struct Cut {
    nodes: [NodeId; 2],
}

impl Cut {
    /// As long as the rule is there, neither of the two reaches the other.
    pub fn new(one: NodeId, other: NodeId) -> Cut {
        Cut { nodes: [one, other] }
    }
}

impl Rule for Cut {
    fn on_connect(&mut self, _now: Time, from: NodeId, to: NodeId) -> Option<String> {
        let is_meant = self.nodes == [from, to] || self.nodes == [to, from];
        is_meant.then(|| format!("there is no way to {to}"))
    }
}
