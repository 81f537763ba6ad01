//! What a coordinator that was started anew waits for: those who know more than it remembers.

use super::scheduler::Resumed;
use crate::limits;
use crate::types::{Clock, NodeId, Time, WorkerId};
use crate::wire::{Hello, Party, Refusal};
use std::collections::{BTreeMap, BTreeSet};

/// The way back into a job.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    /// Numbers are given to newcomers from then on. Some were given, and are not remembered: who has one comes back before.
    newcomers_from: Time,
    /// Without overlap: how far workers are, until all of them have said so.
    clocks: Option<BTreeMap<WorkerId, Resumed>>,
    /// The job was over: who is yet to hear of it, and when nobody is waited for any more.
    farewell: Option<(BTreeSet<NodeId>, Time)>,
}

impl Recovery {
    pub(super) fn begin(now: Time) -> Recovery {
        Recovery { newcomers_from: now + limits::RETURN_GRACE, ..Recovery::default() }
    }

    /// The scheduler is gone with what workers had told it.
    pub(super) fn ask_for_clocks(&mut self) {
        self.clocks = Some(BTreeMap::new());
    }

    /// The job was over, and these have to hear of it.
    pub(super) fn say_farewell(&mut self, to: BTreeSet<NodeId>, now: Time) {
        self.farewell = Some((to, now + limits::RETURN_GRACE));
    }

    /// Whether somebody who comes without a number has to wait for those who have one.
    pub(super) fn refuse_newcomer(&self, now: Time, hello: &Hello) -> Result<(), Refusal> {
        let is_newcomer = match hello.from {
            Party::Worker { .. } => hello.incarnation == 0,
            Party::Shard { server, .. } => server.is_none(),
            Party::Aggregator { id, .. } => id.is_none(),
            _ => false,
        };
        if !is_newcomer || now >= self.newcomers_from {
            return Ok(());
        }
        let reason = "the job's coordinator was started anew, and waits for its members to come back".into();
        Err(Refusal { reason, retry: true })
    }

    /// Whether the scheduler has to be made anew.
    pub(super) fn waits_for_clocks(&self) -> bool {
        self.clocks.is_some()
    }

    /// A worker says how far it is: which clock it has pushed, or that it has yet to push one.
    pub(super) fn take_clock(&mut self, worker: WorkerId, clock: Clock, is_pushed: bool) {
        let Some(clocks) = &mut self.clocks else { return };
        let resumed = Resumed { clock, is_pushed };
        if is_pushed {
            clocks.insert(worker, resumed);
        } else {
            clocks.entry(worker).or_insert(resumed);
        }
    }

    /// How far these workers are, once all of them have said so.
    pub(super) fn poll_clocks(&mut self, running: &[WorkerId]) -> Option<BTreeMap<WorkerId, Resumed>> {
        let clocks = self.clocks.as_ref()?;
        if !running.iter().all(|worker| clocks.contains_key(worker)) {
            return None;
        }
        let mut clocks = self.clocks.take()?;
        clocks.retain(|worker, _| running.contains(worker));
        Some(clocks)
    }

    /// Whether those who come hear that the job was over.
    pub(super) fn is_farewell(&self) -> bool {
        self.farewell.is_some()
    }

    /// Somebody has heard it.
    pub(super) fn told(&mut self, node: NodeId) {
        if let Some((untold, until)) = &mut self.farewell {
            untold.remove(&node);
            if untold.is_empty() {
                *until = Time::ZERO;
            }
        }
    }

    /// Whether everybody has heard it, or nobody is waited for any more; once.
    pub(super) fn poll_farewell(&mut self, now: Time) -> bool {
        self.farewell.take_if(|(_, until)| *until <= now).is_some()
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.farewell.as_ref().map(|(_, until)| *until)
    }
}
