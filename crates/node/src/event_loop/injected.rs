//! Faults that somebody asked for, carried out by the real driver in the words of `paramill_core::fault`.

use crate::clock;
use paramill_core::fault::{Fate, FaultPlan, FrameFaults};
use paramill_core::types::{NodeId, Time};
use paramill_core::wire::Header;
use std::time::Duration;

/// Faults to try, for tests and experiments.
#[derive(Debug, Clone, Default)]
pub struct Injection {
    /// The faults.
    pub plan: FaultPlan,
    /// Decides those that have a probability.
    pub seed: u64,
}

/// The faults of one node, under way.
#[derive(Debug)]
pub(super) struct Injected {
    injection: Injection,
    frames: FrameFaults,
    node: Option<NodeId>,
    slowdown: f64,
    pauses: Vec<(Time, Duration)>,
    crash_at: Option<Time>,
}

impl Injected {
    pub(super) fn new(injection: &Injection) -> Injected {
        Injected {
            frames: FrameFaults::new(&injection.plan, injection.seed),
            injection: injection.clone(),
            node: None,
            slowdown: 1.0,
            pauses: Vec::new(),
            crash_at: None,
        }
    }

    /// Whether this node, or who it turns out to be, may pause, crash or be slow.
    pub(super) fn may_interfere(&self) -> bool {
        !self.injection.plan.is_empty()
    }

    /// Pauses or crashes the node when it is time; also when its thread should do neither, this is cheap.
    pub(super) fn interfere(&mut self, node: NodeId, now: Time) -> Result<(), String> {
        if self.node != Some(node) {
            self.node = Some(node);
            self.slowdown = self.injection.plan.slowdown(node);
            self.pauses = self.injection.plan.pauses(node).collect();
            self.crash_at = self.injection.plan.crash_at(node);
        }
        if self.crash_at.is_some_and(|at| at <= now) {
            return Err(format!("{node} crashed, as injected"));
        }
        while let Some(due) = self.pauses.iter().position(|(at, _)| *at <= now) {
            let (_, duration) = self.pauses.swap_remove(due);
            std::thread::sleep(duration);
        }
        Ok(())
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.pauses.iter().map(|(at, _)| *at).chain(self.crash_at).min()
    }

    /// Makes a turn of the loop take as much longer as was asked for. Workers are slowed in their computation.
    pub(super) fn slow_down(&self, began: Time) {
        if self.slowdown > 1.0 && matches!(self.node, Some(NodeId::Shard(_))) {
            std::thread::sleep(clock::now().since(began).mul_f64(self.slowdown - 1.0));
        }
    }

    /// Whether no frame is ever troubled.
    pub(super) fn is_idle(&self) -> bool {
        self.frames.is_empty()
    }

    pub(super) fn fate(&mut self, from: NodeId, to: Option<NodeId>, header: &Header) -> Fate {
        self.frames.fate(from, to, header)
    }
}
