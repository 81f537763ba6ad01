//! Whoever watches a world.

use crate::rule::FrameView;
use paramill_core::types::{NodeId, Time};

/// Watches a world. No method is required. An error ends the run with its sentence.
pub trait Observer<R> {
    /// A frame is sent; `role` is the sender.
    fn on_sent(&mut self, frame: &FrameView<'_>, role: &R) -> Result<(), String> {
        let _ = (frame, role);
        Ok(())
    }

    /// A frame is about to be handled; `role` is the receiver, as it was before.
    fn on_delivered(&mut self, frame: &FrameView<'_>, role: &R) -> Result<(), String> {
        let _ = (frame, role);
        Ok(())
    }

    /// A node has handled an event and its outputs are carried out.
    fn on_settled(&mut self, now: Time, node: NodeId, role: &R) -> Result<(), String> {
        let _ = (now, node, role);
        Ok(())
    }
}

/// Watches nothing.
#[derive(Debug, Clone, Copy)]
pub struct Unobserved;

impl<R> Observer<R> for Unobserved {}

/// Why a run ended before its time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} (at {:.6} s of virtual time)", at.as_secs_f64())]
pub struct Violation {
    /// When.
    pub at: Time,
    /// What an observer found.
    pub what: String,
}

/// What happened so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Events.
    pub events: u64,
    /// Frames that links have taken.
    pub frames: u64,
    /// Frames that waited at their sender since the window was full.
    pub waited: u64,
    /// Payloads that were received where the role wanted them.
    pub landings: u64,
    /// Nodes that were started anew.
    pub restarts: u64,
    /// Nodes in whose place another process has gone on.
    pub handovers: u64,
    /// Nodes that were started later than the others.
    pub late: u64,
}
