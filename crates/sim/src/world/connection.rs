//! A connection between two nodes.

use super::channel::Channel;
use paramill_core::prng::Prng;
use paramill_core::types::{ConnectionId, ShardId, Time};

/// One end of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    /// Whose end.
    pub(super) node: usize,
    /// What that node's role calls the connection.
    pub(super) name: ConnectionId,
}

/// A connection between two nodes. Side 0 opened it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) ends: [End; 2],
    pub(super) is_open: bool,
    /// Whether each side knows of it.
    pub(super) is_attached: [bool; 2],
    /// Which life of its opener it belongs to.
    pub(super) life: u32,
    /// What goes towards each side.
    pub(super) channels: [Channel; 2],
}

impl Connection {
    /// A connection whose opener learns of it at `opened` and hears nothing before.
    pub(super) fn new(ends: [End; 2], life: u32, opened: Time, dice: [Prng; 2]) -> Connection {
        let channels = dice.map(|dice| Channel::new(opened, dice));
        Connection { ends, is_open: true, is_attached: [false; 2], life, channels }
    }

    /// The side that hears what `node` sends.
    pub(super) fn other_side(&self, node: usize) -> usize {
        usize::from(self.ends[0].node == node)
    }

    /// The shard at one of its ends, or behind the aggregator at one of them.
    pub(super) fn shard(&self) -> Option<ShardId> {
        self.ends.iter().find_map(|end| end.name.shard())
    }

    /// Breaks it. Says whether it stood.
    pub(super) fn break_down(&mut self) -> bool {
        self.channels.iter_mut().for_each(Channel::clear);
        std::mem::replace(&mut self.is_open, false)
    }
}
