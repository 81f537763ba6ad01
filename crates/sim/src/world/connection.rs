use paramill_core::types::{NodeId, Time};

/// One end of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    /// Whose end.
    pub(super) node: usize,
    /// What that node calls the other end.
    pub(super) peer: NodeId,
}

/// A connection between two nodes. Side 0 opened it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) ends: [End; 2],
    pub(super) open: bool,
    /// When the last frame towards each side reaches that side's link; the next one comes after it.
    pub(super) arrived: [Time; 2],
    /// When the last frame towards each side is delivered; the next one comes after it.
    pub(super) delivered: [Time; 2],
}

impl Connection {
    /// A connection whose opener learns of it at `opened` and hears nothing before.
    pub(super) fn new(ends: [End; 2], opened: Time) -> Connection {
        Connection { ends, open: true, arrived: [opened; 2], delivered: [opened; 2] }
    }

    /// The side that hears what `node` sends.
    pub(super) fn other_side(&self, node: usize) -> usize {
        usize::from(self.ends[0].node == node)
    }
}
