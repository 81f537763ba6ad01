//! Where nodes are reached.

use paramill_core::address::Addresses;
use std::collections::BTreeMap;

/// The addresses of a world, each with the node that it leads to.
#[derive(Debug, Default)]
pub(super) struct Directory(BTreeMap<String, usize>);

impl Directory {
    /// An address leads to a node from now on.
    pub(super) fn enter(&mut self, address: &str, node: usize) {
        self.0.insert(address.to_owned(), node);
    }

    /// The node that an address leads to.
    pub(super) fn find(&self, address: &str) -> Option<usize> {
        self.0.get(address).copied()
    }

    /// All addresses of a node.
    pub(super) fn of(&self, node: usize) -> Addresses {
        self.0.iter().filter(|(_, known)| **known == node).map(|(address, _)| address.clone()).collect()
    }
}
