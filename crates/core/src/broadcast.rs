//! The broadcast axis: on which way a version of a shard's parameters reaches everybody who reads them.
//!
//! A choice makes a [`Forest`], a [`Tree`] for every root: the root is a shard, the other nodes are receivers (workers and
//! subscribers), and each of them takes the shard's stream from its parent. What a root publishes reaches every receiver
//! once, on a path through receivers that relay.

mod auto;
mod chain;
mod forest;
mod kary;
mod none;
mod rotated;
mod star;
mod topology;
mod tree;

pub use forest::{Forest, Parent, Quality, Tree};
pub use topology::{Costs, Oversubscription, Site, Topology, TopologyError};
pub use tree::{P3, Solved};

use crate::registry::Axis;
use std::fmt;

/// A reader of all roots' streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receiver {
    /// Where it is, as [`Topology::site`] says.
    pub site: Site,
    /// Whether others can connect to it. One that cannot be reached is a leaf of every tree.
    pub can_relay: bool,
}

/// The nodes that a forest is made for.
#[derive(Debug, Clone, Copy)]
pub struct Members<'a> {
    /// Where the roots are, in the order of their numbers; at least one.
    pub roots: &'a [Site],
    /// The live receivers, ascending by rank. A receiver's number is its index here.
    pub receivers: &'a [Receiver],
    /// The network between them.
    pub topology: &'a Topology,
}

impl Members<'_> {
    /// The receivers, those that can relay before those that cannot, each ascending; and the number of the former.
    fn relays_first(&self) -> (Vec<u32>, usize) {
        let numbers = || (0u32..).zip(self.receivers);
        let relays = numbers().filter(|(_, receiver)| receiver.can_relay);
        let leaves = numbers().filter(|(_, receiver)| !receiver.can_relay);
        let count = relays.clone().count();
        (relays.chain(leaves).map(|(number, _)| number).collect(), count)
    }
}

/// Why there is no forest of these members. Nothing was changed by it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ForestError {
    /// The bounds of a tree leave no room for all receivers.
    #[error(
        "a tree with degree={degree}, depth={depth} has room for {room} of these {receivers} receivers, of which {relays} can \
         relay; raise degree or depth"
    )]
    NoRoom {
        /// Children of a node at most.
        degree: usize,
        /// Hops from the root at most.
        depth: usize,
        /// Receivers that such a tree can have.
        room: usize,
        /// Receivers that there are.
        receivers: usize,
        /// Those of them that can have children.
        relays: usize,
    },
    /// Parents that are no tree: a bug of the choice that gave them.
    #[error("tree of root {root}: {why}")]
    NoTree {
        /// The number of the root.
        root: usize,
        /// What is wrong.
        why: String,
    },
}

/// A topology of broadcasts. One method is required.
pub trait Broadcast: Send + Sync + fmt::Debug {
    /// A tree for every root. Every receiver MUST be in every tree, receivers that cannot relay MUST have no children, and
    /// the result MUST follow from the arguments alone. It is called again whenever a member comes or goes: it MUST NOT take
    /// longer than a second for 1,000 receivers.
    fn forest(&self, members: &Members<'_>) -> Result<Forest, ForestError>;

    /// Whether servers publish what they have at all. Where they do not, they answer pulls, and the forest is a star.
    fn publishes(&self) -> bool {
        true
    }
}

/// The choices of this axis.
pub fn axis() -> Axis<dyn Broadcast> {
    let entries =
        vec![none::ENTRY, star::ENTRY, chain::ENTRY, kary::ENTRY, tree::ENTRY, rotated::ENTRY, auto::ENTRY];
    Axis::new("broadcast", &[], entries)
}
