//! The plan from epoch to epoch: who has entered which, and when workers hear of it.
//!
//! A change goes to the shards and aggregators first. Workers hear of it when all of them have entered its epoch, so that what a
//! worker sends under a new epoch never meets a shard that does not know it.

use crate::types::{AggregatorId, Clock, NodeId, ShardId, WorkerId};
use crate::wire::{Change, Control, FirstClock, Plan, Standing};
use std::collections::{BTreeMap, VecDeque};

/// The plan's epochs.
#[derive(Debug)]
pub(super) struct Epochs {
    newest: Plan,
    /// The newest plan that all shards and connected aggregators have entered: the one that workers know.
    settled: Plan,
    /// The changes between the two, with their epochs.
    unsettled: VecDeque<(u32, Change)>,
    /// The last epoch that each shard, and each aggregator that is connected, said it is in. 0 before its first.
    entered: BTreeMap<NodeId, u32>,
    joining: BTreeMap<WorkerId, FirstClocks>,
}

/// The shards' answers about the first clock of a joining worker.
#[derive(Debug)]
struct FirstClocks {
    incarnation: u64,
    /// Its first clock is not before this one.
    at_least: Clock,
    answered: BTreeMap<ShardId, Clock>,
}

impl Epochs {
    /// A plan that no shard has entered yet.
    pub(super) fn new(plan: Plan) -> Epochs {
        let entered = plan.shards.iter().map(|served| (NodeId::Shard(served.shard), 0)).collect();
        Epochs {
            settled: plan.clone(),
            newest: plan,
            unsettled: VecDeque::new(),
            entered,
            joining: BTreeMap::new(),
        }
    }

    /// The newest plan, which shards and aggregators are told.
    pub(super) fn newest(&self) -> &Plan {
        &self.newest
    }

    /// The last plan that all shards and connected aggregators have entered, which workers are told.
    pub(super) fn settled(&self) -> &Plan {
        &self.settled
    }

    /// Makes the next epoch. Returns the message that tells of it.
    pub(super) fn make(&mut self, change: Change, at_least: Clock) -> Control {
        let epoch = self.newest.epoch + 1;
        self.newest.apply(epoch, &change);
        match change {
            Change::Joining { worker, incarnation } => {
                let clocks = FirstClocks { incarnation, at_least, answered: BTreeMap::new() };
                self.joining.insert(worker, clocks);
            }
            Change::Joined { worker, .. } | Change::Left { worker } => {
                self.joining.remove(&worker);
            }
            Change::Policy(_) => {}
        }
        self.unsettled.push_back((epoch, change.clone()));
        Control::Change { epoch, change }
    }

    /// A shard has entered an epoch, and says which clocks could be the first ones of joining workers.
    pub(super) fn shard_entered(&mut self, id: ShardId, epoch: u32, joining: &[FirstClock]) {
        self.note_entered(NodeId::Shard(id), epoch);
        for first in joining {
            if let Some(clocks) = self.joining.get_mut(&first.worker)
                && clocks.incarnation == first.incarnation
            {
                clocks.answered.insert(id, first.clock);
            }
        }
    }

    /// An aggregator has entered an epoch.
    pub(super) fn aggregator_entered(&mut self, id: AggregatorId, epoch: u32) {
        self.note_entered(NodeId::Aggregator(id), epoch);
    }

    fn note_entered(&mut self, node: NodeId, epoch: u32) {
        // A peer's claim to have entered an epoch that does not exist yet is not believed.
        let epoch = epoch.min(self.newest.epoch);
        if let Some(entered) = self.entered.get_mut(&node) {
            *entered = epoch.max(*entered);
        }
    }

    /// An aggregator that is here is waited for; one that is not is told everything when it comes back.
    pub(super) fn await_aggregator(&mut self, id: AggregatorId) {
        self.entered.entry(NodeId::Aggregator(id)).or_insert(0);
    }

    pub(super) fn forget_aggregator(&mut self, id: AggregatorId) {
        self.entered.remove(&NodeId::Aggregator(id));
    }

    /// Whether a shard has the plan in place.
    pub(super) fn has_entered(&self, id: ShardId) -> bool {
        self.entered.get(&NodeId::Shard(id)).is_some_and(|&epoch| epoch > 0)
    }

    /// Shards that have the plan in place.
    pub(super) fn entered_count(&self) -> usize {
        let is_ready = |(node, epoch): &(&NodeId, &u32)| matches!(node, NodeId::Shard(_)) && **epoch > 0;
        self.entered.iter().filter(is_ready).count()
    }

    /// Whether all shards have the plan in place: the job can start.
    pub(super) fn are_ready(&self) -> bool {
        self.entered_count() == self.newest.shards.len()
    }

    /// A joining worker for which all shards have answered: its first clock is the latest of theirs.
    pub(super) fn poll_joined(&self) -> Option<Change> {
        let shards = self.newest.shards.len();
        let (worker, clocks) = self.joining.iter().find(|(_, clocks)| clocks.answered.len() == shards)?;
        let latest = clocks.answered.values().copied().max().unwrap_or(0);
        Some(Change::Joined { worker: *worker, clock: latest.max(clocks.at_least) })
    }

    /// The next change that all shards and connected aggregators have entered: workers may be told.
    pub(super) fn poll_settled(&mut self) -> Option<(u32, Change)> {
        let everybody = self.entered.values().copied().min().unwrap_or(0);
        self.unsettled.front().filter(|(epoch, _)| *epoch <= everybody)?;
        let (epoch, change) = self.unsettled.pop_front()?;
        self.settled.apply(epoch, &change);
        Some((epoch, change))
    }

    /// Checks that the settled plan and the unsettled changes lead to the newest plan.
    pub(super) fn check(&self) -> Result<(), String> {
        // A whole plan may be long: it is compared only while there are changes.
        let leads = if self.unsettled.is_empty() {
            self.settled.epoch == self.newest.epoch
        } else {
            let mut reached = self.settled.clone();
            self.unsettled.iter().for_each(|(epoch, change)| reached.apply(*epoch, change));
            reached == self.newest
        };
        if !leads {
            return Err("the changes that are not settled do not lead to the newest plan".into());
        }
        let is_joining = |worker: &WorkerId| {
            self.newest.member(*worker).is_some_and(|member| member.standing == Standing::Joining)
        };
        match self.joining.keys().find(|worker| !is_joining(worker)) {
            Some(worker) => Err(format!("first clocks are awaited for {worker}, which is not joining")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Part;
    use crate::policy::{Policies, Policy, PolicyOverride};
    use crate::table::TableSpec;
    use crate::types::{ProcessId, ServerId};
    use crate::wire::{Member, ServedShard};

    fn shard(server: u32) -> ShardId {
        ShardId { server: ServerId(server), core: 0 }
    }

    fn served(server: u32) -> ServedShard {
        let process = ProcessId(u64::from(server) + 100);
        ServedShard { shard: shard(server), process, addresses: "host:1".into() }
    }

    fn epochs() -> Epochs {
        Epochs::new(Plan {
            epoch: Plan::FIRST_EPOCH,
            tables: vec![TableSpec::dense("w", [1])],
            parts: vec![vec![Part { server: ServerId(0), start: 0, len: 1 }]],
            shards: [0, 1].map(served).to_vec(),
            workers: 1,
            members: vec![Member::original(WorkerId(0), 1)],
            policy: Policy::default(),
            overrides: vec![],
            switches: vec![],
            seed: 0,
        })
    }

    fn first(clock: Clock) -> Vec<FirstClock> {
        vec![FirstClock { worker: WorkerId(1), incarnation: 7, clock }]
    }

    #[test]
    fn workers_hear_of_a_change_when_everybody_has_entered_it() {
        let mut epochs = epochs();
        epochs.await_aggregator(AggregatorId(0));
        assert!(!epochs.are_ready());
        (0..2).for_each(|server| epochs.shard_entered(shard(server), 1, &[]));
        assert!(epochs.are_ready(), "a job starts without its aggregators");
        let change = Change::Policy(PolicyOverride::new("*", Policies::default()));
        epochs.make(change.clone(), 0);
        epochs.shard_entered(shard(0), 2, &[]);
        // A shard repeats an earlier answer.
        epochs.shard_entered(shard(0), 1, &[]);
        epochs.shard_entered(shard(1), u32::MAX, &[]);
        assert_eq!(epochs.poll_settled(), None, "the aggregator is behind");
        epochs.forget_aggregator(AggregatorId(0));
        assert_eq!(epochs.poll_settled(), Some((2, change)));
        assert_eq!((epochs.poll_settled(), epochs.settled()), (None, epochs.newest()));
        epochs.make(Change::Left { worker: WorkerId(0) }, 0);
        assert_eq!(epochs.poll_settled(), None, "an epoch that was not there yet cannot have been entered");
        assert_eq!(epochs.check(), Ok(()));
    }

    #[test]
    fn the_first_clock_is_the_latest_of_all_shards() {
        let mut epochs = epochs();
        let worker = WorkerId(1);
        epochs.make(Change::Joining { worker, incarnation: 7 }, 2);
        epochs.shard_entered(shard(0), 2, &first(5));
        assert_eq!(epochs.poll_joined(), None);
        let other = FirstClock { incarnation: 6, ..first(90)[0] };
        epochs.shard_entered(shard(1), 2, &[other]);
        assert_eq!(epochs.poll_joined(), None, "another process is spoken of");
        epochs.shard_entered(shard(1), 2, &first(3));
        let joined = Change::Joined { worker, clock: 5 };
        assert_eq!(epochs.poll_joined(), Some(joined.clone()));
        epochs.make(joined, 0);
        assert_eq!(epochs.poll_joined(), None);
        assert_eq!(epochs.check(), Ok(()));
    }

    #[test]
    fn a_worker_that_dies_while_it_joins_is_not_waited_for() {
        let mut epochs = epochs();
        let worker = WorkerId(1);
        epochs.make(Change::Joining { worker, incarnation: 7 }, 0);
        epochs.shard_entered(shard(0), 2, &first(5));
        epochs.make(Change::Left { worker }, 0);
        epochs.shard_entered(shard(1), 2, &first(5));
        assert_eq!(epochs.poll_joined(), None);
        assert_eq!(epochs.check(), Ok(()));
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let mut epochs = epochs();
        epochs.settled.epoch += 1;
        assert!(epochs.check().is_err(), "nothing leads from one plan to the other");
        let mut epochs = self::epochs();
        epochs.make(Change::Left { worker: WorkerId(0) }, 0);
        epochs.newest.seed += 1;
        assert!(epochs.check().is_err(), "the change leads to another plan");
        let mut epochs = self::epochs();
        epochs.make(Change::Joining { worker: WorkerId(1), incarnation: 7 }, 2);
        epochs.newest = epochs.settled.clone();
        epochs.unsettled.clear();
        assert!(epochs.check().is_err(), "nobody joins");
    }
}
