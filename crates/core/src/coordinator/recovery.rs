//! What a coordinator that was started anew waits for: those who know more than it remembers.

use super::scheduler::Resumed;
use crate::limits;
use crate::types::{Clock, NodeId, ProcessId, Time, WorkerId};
use crate::wire::{Hello, Party, Plan, Refusal, ServedShard};
use std::collections::{BTreeMap, BTreeSet};

/// The way back into a job.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    /// Numbers are given to newcomers from then on. Some were given, and are not remembered: who has one comes back before.
    newcomers_from: Time,
    /// Without overlap: how far workers are, until all of them have said so.
    clocks: Option<BTreeMap<WorkerId, Resumed>>,
    /// The job is over: the members that have yet to hear of it, and when they are waited for no longer.
    farewell: Option<(BTreeSet<NodeId>, Time)>,
    /// Processes that a shard was taken from, one entry for each, and until when they are waited for. Their cores come back as
    /// spare ones under numbers that are not known yet.
    retired: Vec<(ProcessId, Time)>,
    /// The process that coordinated the job before served shards that nobody has a copy of.
    has_lost_parameters: bool,
}

impl Recovery {
    pub(super) fn begin(now: Time) -> Recovery {
        Recovery { newcomers_from: now + limits::RETURN_GRACE, ..Recovery::default() }
    }

    /// The server process that coordinated the job before, if that was one.
    pub(super) fn note_former(&mut self, process: Option<ProcessId>, plan: &Plan) {
        let is_lost = |served: &ServedShard| Some(served.process) == process && served.copy.is_none();
        self.has_lost_parameters = plan.shards.iter().any(is_lost);
    }

    /// Whether that process served shards that nobody has a copy of.
    pub(super) fn has_lost_parameters(&self) -> bool {
        self.has_lost_parameters
    }

    /// The scheduler is gone with what workers had told it.
    pub(super) fn ask_for_clocks(&mut self) {
        self.clocks = Some(BTreeMap::new());
    }

    /// The job is over, and these have to hear of it.
    pub(super) fn say_farewell(&mut self, to: BTreeSet<NodeId>, now: Time) {
        self.farewell = Some((to, now + limits::RETURN_GRACE));
    }

    /// The process serves one shard less from now on. It has lost its connection, and hears of that when it comes back.
    pub(super) fn note_retired(&mut self, process: ProcessId, now: Time) {
        self.retired.retain(|(_, until)| now < *until);
        self.retired.push((process, now + limits::RETURN_GRACE));
    }

    /// Whether a core that a shard was taken from has yet to come back: a job that ends now has to tell it.
    pub(super) fn awaits_retired(&self, now: Time) -> bool {
        self.retired.iter().any(|(_, until)| now < *until)
    }

    /// A spare core of this process is here, under this name.
    pub(super) fn note_spare(&mut self, process: ProcessId, node: NodeId) {
        let Some(at) = self.retired.iter().position(|(known, _)| *known == process) else { return };
        self.retired.swap_remove(at);
        if let Some((untold, _)) = &mut self.farewell {
            untold.insert(node);
        }
    }

    /// Whether somebody who comes without a number has to wait for those who have one. A data core does not once there is a plan, which has the
    /// numbers: it may have a copy that is to take over.
    pub(super) fn refuse_newcomer(&self, now: Time, hello: &Hello, is_planned: bool) -> Result<(), Refusal> {
        let is_newcomer = match hello.from {
            Party::Worker { .. } => hello.incarnation == 0,
            Party::Shard { server, .. } => server.is_none() && !is_planned,
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

    /// Whether members that connect are told that the job is over.
    pub(super) fn is_farewell(&self) -> bool {
        self.farewell.is_some()
    }

    /// Somebody has heard it.
    pub(super) fn told(&mut self, node: NodeId) {
        if let Some((untold, until)) = &mut self.farewell {
            untold.remove(&node);
            if untold.is_empty() && self.retired.is_empty() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const OLD: ProcessId = ProcessId(7);
    const SPARE: NodeId = NodeId::Spare(3);

    #[test]
    fn a_job_that_ends_waits_for_the_core_that_a_shard_was_taken_from() {
        let now = Time::ZERO;
        let mut recovery = Recovery::default();
        assert!(!recovery.awaits_retired(now));
        recovery.note_retired(OLD, now);
        assert!(recovery.awaits_retired(now));
        recovery.say_farewell(BTreeSet::new(), now);
        recovery.told(NodeId::Spare(1));
        assert!(!recovery.poll_farewell(now), "it has not come back");
        recovery.note_spare(ProcessId(8), NodeId::Spare(2));
        recovery.note_spare(OLD, SPARE);
        assert!(!recovery.poll_farewell(now), "it is here, and not told");
        recovery.told(SPARE);
        assert!(recovery.poll_farewell(now));
    }

    #[test]
    fn a_core_that_came_back_or_stays_away_is_not_waited_for() {
        let mut recovery = Recovery::default();
        recovery.note_retired(OLD, Time::ZERO);
        recovery.note_spare(OLD, SPARE);
        assert!(!recovery.awaits_retired(Time::ZERO));
        recovery.note_retired(OLD, Time::ZERO);
        let later = Time::ZERO + limits::RETURN_GRACE;
        assert!(recovery.awaits_retired(Time(later.0 - 1)) && !recovery.awaits_retired(later));
        recovery.say_farewell(BTreeSet::new(), later);
        assert!(recovery.poll_farewell(later + limits::RETURN_GRACE + Duration::from_nanos(1)));
    }
}
