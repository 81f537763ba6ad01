//! The plan from epoch to epoch: who has entered which, and when workers hear of it.
//!
//! A change goes to the shards and aggregators first. Workers hear of it when all of them have entered its epoch, so that what a
//! worker sends under a new epoch never meets a shard that does not know it.

use super::memory::RunState;
use crate::standstill::Standstill;
use crate::types::{AggregatorId, Clock, NodeId, ShardId, Time, WorkerId};
use crate::wire::{Change, Control, FirstClock, Member, Plan, Standing};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// So many of those who are behind are named; the others are counted.
const NAMED: usize = 4;

/// The plan's epochs.
#[derive(Debug)]
pub(super) struct Epochs {
    newest: Plan,
    /// The newest plan that all shards and connected aggregators have entered: the one that workers know.
    settled: Plan,
    /// The changes between the two, with their epochs.
    unsettled: VecDeque<(u32, Change)>,
    /// Those who are waited for: every shard, and every aggregator that has caught up on its connection.
    followers: BTreeMap<NodeId, Follower>,
    joining: BTreeMap<WorkerId, FirstClocks>,
}

/// How far somebody follows.
#[derive(Debug, Clone, Copy)]
struct Follower {
    /// The last epoch that it said it is in. 0 before its first.
    entered: u32,
    /// Since when it has not said so of the next one, if there is one; later by the time that the coordinator has stood still
    /// since.
    since: Time,
}

/// The answers of shards and aggregators about the first clock of a joining worker.
#[derive(Debug)]
struct FirstClocks {
    incarnation: u64,
    /// Its first clock is not before this one.
    at_least: Clock,
    answered: BTreeMap<NodeId, Clock>,
}

impl Epochs {
    /// A plan that no shard has entered yet.
    pub(super) fn new(plan: Plan) -> Epochs {
        let follower = Follower { entered: 0, since: Time::ZERO };
        let followers = plan.shards.iter().map(|served| (NodeId::Shard(served.shard), follower)).collect();
        Epochs {
            settled: plan.clone(),
            newest: plan,
            unsettled: VecDeque::new(),
            followers,
            joining: BTreeMap::new(),
        }
    }

    /// What has to be remembered.
    pub(super) fn remembered(&self, is_running: bool) -> RunState {
        let unsettled = self.unsettled.iter().cloned().collect();
        RunState { settled: self.settled.clone(), unsettled, is_running }
    }

    /// Goes on with what was remembered: shards, and aggregators that were there, say anew which epoch they have entered, and which
    /// clocks could be the first ones of joining workers.
    pub(super) fn restore(
        now: Time,
        run: RunState,
        aggregators: impl Iterator<Item = AggregatorId>,
    ) -> Epochs {
        let mut epochs = Epochs::new(run.settled);
        for (epoch, change) in run.unsettled {
            epochs.newest.apply(epoch, &change);
            epochs.unsettled.push_back((epoch, change));
        }
        let joining = epochs.newest.live_members().filter(|member| member.standing == Standing::Joining);
        let clocks = |member: &Member| FirstClocks {
            incarnation: member.incarnation,
            at_least: 1,
            answered: BTreeMap::new(),
        };
        epochs.joining = joining.map(|member| (member.worker, clocks(member))).collect();
        let away = Follower { entered: 0, since: now };
        epochs.followers.extend(aggregators.map(|id| (NodeId::Aggregator(id), away)));
        epochs
    }

    /// Workers that join, whose first clocks are not known.
    pub(super) fn joining(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.joining.keys().copied()
    }

    /// The first clock of a joining worker is not before this one.
    pub(super) fn postpone(&mut self, worker: WorkerId, at_least: Clock) {
        if let Some(clocks) = self.joining.get_mut(&worker) {
            clocks.at_least = clocks.at_least.max(at_least);
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
    pub(super) fn make(&mut self, now: Time, change: Change, at_least: Clock) -> Control {
        let epoch = self.newest.epoch + 1;
        let up_to_date = self.followers.values_mut().filter(|follower| follower.entered + 1 == epoch);
        up_to_date.for_each(|follower| follower.since = now);
        self.newest.apply(epoch, &change);
        match change {
            Change::Joining { worker, incarnation } => {
                let clocks = FirstClocks { incarnation, at_least, answered: BTreeMap::new() };
                self.joining.insert(worker, clocks);
            }
            Change::Joined { worker, .. } | Change::Left { worker } => {
                self.joining.remove(&worker);
            }
            Change::Policy(_) | Change::Served { .. } => {}
        }
        self.unsettled.push_back((epoch, change.clone()));
        Control::Change { epoch, change }
    }

    /// A shard has entered an epoch, and says which clocks could be the first ones of joining workers.
    pub(super) fn shard_entered(&mut self, now: Time, id: ShardId, epoch: u32, joining: &[FirstClock]) {
        let node = NodeId::Shard(id);
        self.note_entered(now, node, epoch);
        self.note_first_clocks(node, joining);
    }

    /// An aggregator has entered an epoch, and says the same. It is waited for from the newest one on: one that is not here, or has
    /// not caught up, is told everything, and knows by the epochs of frames what it has not heard of.
    pub(super) fn aggregator_entered(
        &mut self,
        now: Time,
        id: AggregatorId,
        epoch: u32,
        joining: &[FirstClock],
    ) {
        let node = NodeId::Aggregator(id);
        if epoch >= self.newest.epoch {
            self.followers.entry(node).or_insert(Follower { entered: 0, since: now });
        }
        self.note_entered(now, node, epoch);
        self.note_first_clocks(node, joining);
    }

    fn note_first_clocks(&mut self, node: NodeId, joining: &[FirstClock]) {
        for first in joining {
            if let Some(clocks) = self.joining.get_mut(&first.worker)
                && clocks.incarnation == first.incarnation
            {
                clocks.answered.insert(node, first.clock);
            }
        }
    }

    fn note_entered(&mut self, now: Time, node: NodeId, epoch: u32) {
        // A peer's claim to have entered an epoch that does not exist yet is not believed.
        let epoch = epoch.min(self.newest.epoch);
        if let Some(follower) = self.followers.get_mut(&node).filter(|follower| follower.entered < epoch) {
            *follower = Follower { entered: epoch, since: now };
        }
    }

    pub(super) fn forget_aggregator(&mut self, id: AggregatorId) {
        self.followers.remove(&NodeId::Aggregator(id));
    }

    /// The aggregators that have not entered the next epoch for so long, and that epoch.
    pub(super) fn overdue(
        &self,
        now: Time,
        grace: Duration,
        standstill: &Standstill,
    ) -> Vec<(AggregatorId, u32)> {
        let is_overdue = |follower: &Follower| {
            follower.entered < self.newest.epoch && standstill.deadline(follower.since, grace) <= now
        };
        let overdue = |(node, follower): (&NodeId, &Follower)| match node {
            NodeId::Aggregator(id) if is_overdue(follower) => Some((*id, follower.entered + 1)),
            _ => None,
        };
        self.followers.iter().filter_map(overdue).collect()
    }

    /// When [`Epochs::overdue`] is to be asked.
    pub(super) fn next_deadline(&self, grace: Duration, standstill: &Standstill) -> Option<Time> {
        let is_behind = |(node, follower): &(&NodeId, &Follower)| {
            matches!(node, NodeId::Aggregator(_)) && follower.entered < self.newest.epoch
        };
        let behind = self.followers.iter().filter(is_behind);
        behind.map(|(_, follower)| standstill.deadline(follower.since, grace)).min()
    }

    pub(super) fn since_mut(&mut self) -> impl Iterator<Item = &mut Time> {
        self.followers.values_mut().map(|follower| &mut follower.since)
    }

    /// Who has not entered an epoch, as a sentence, if anybody has not.
    pub(super) fn behind(&self, epoch: u32) -> Option<String> {
        let behind = self.followers.iter().filter(|(_, follower)| follower.entered < epoch);
        let mut names: Vec<String> = behind.map(|(node, _)| node.to_string()).collect();
        let has = if names.len() == 1 { "has" } else { "have" };
        if names.len() > NAMED {
            let others = names.split_off(NAMED - 1).len();
            names.push(format!("{others} others"));
        }
        let last = names.pop()?;
        let names = if names.is_empty() { last } else { format!("{} and {last}", names.join(", ")) };
        Some(format!("{names} {has} not entered epoch {epoch} yet"))
    }

    /// Why workers have not heard of the newest epoch, if they have not.
    pub(super) fn why_unsettled(&self) -> Option<String> {
        self.unsettled.back().and_then(|(epoch, _)| self.behind(*epoch))
    }

    /// Why a process that joins does not take part yet, if it is one: those whom the job begins with do not join.
    pub(super) fn why_not_joined(&self, worker: WorkerId, incarnation: u64) -> Option<String> {
        let own = self.newest.member(worker).filter(|own| own.incarnation == incarnation)?;
        let joins = own.is_live() && !self.newest.is_original(own);
        self.behind(own.since).filter(|_| joins)
    }

    /// Whether a shard has the plan in place.
    pub(super) fn has_entered(&self, id: ShardId) -> bool {
        self.followers.get(&NodeId::Shard(id)).is_some_and(|follower| follower.entered > 0)
    }

    /// Shards that have the plan in place.
    pub(super) fn entered_count(&self) -> usize {
        let is_ready = |(node, follower): &(&NodeId, &Follower)| {
            matches!(node, NodeId::Shard(_)) && follower.entered > 0
        };
        self.followers.iter().filter(is_ready).count()
    }

    /// Whether all shards have the plan in place: the job can start.
    pub(super) fn are_ready(&self) -> bool {
        self.entered_count() == self.newest.shards.len()
    }

    /// A joining worker for which all shards and connected aggregators have answered: its first clock is the latest of theirs.
    pub(super) fn poll_joined(&self) -> Option<Change> {
        let is_known = |clocks: &FirstClocks| {
            self.followers.keys().all(|follower| clocks.answered.contains_key(follower))
        };
        let (worker, clocks) = self.joining.iter().find(|(_, clocks)| is_known(clocks))?;
        let latest = clocks.answered.values().copied().max().unwrap_or(0);
        Some(Change::Joined { worker: *worker, clock: latest.max(clocks.at_least) })
    }

    /// The next change that all shards and connected aggregators have entered: workers may be told.
    pub(super) fn poll_settled(&mut self) -> Option<(u32, Change)> {
        let everybody = self.followers.values().map(|follower| follower.entered).min().unwrap_or(0);
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
    use crate::wire::ServedShard;

    const NOW: Time = Time(1_000_000_000);

    fn shard(server: u32) -> ShardId {
        ShardId { server: ServerId(server), core: 0 }
    }

    fn served(server: u32) -> ServedShard {
        let process = ProcessId(u64::from(server) + 100);
        ServedShard::original(shard(server), process, "host:1".into())
    }

    fn epochs() -> Epochs {
        Epochs::new(Plan {
            epoch: Plan::FIRST_EPOCH,
            tables: vec![TableSpec::dense("w", [1])],
            parts: vec![vec![Part { server: ServerId(0), start: 0, len: 1 }]],
            whole: vec![],
            shards: [0, 1].map(served).to_vec(),
            workers: 1,
            members: vec![Member::original(WorkerId(0), 1)],
            policy: Policy::default(),
            overrides: vec![],
            switches: vec![],
            seed: 0,
            resumed: None,
        })
    }

    fn first(clock: Clock) -> Vec<FirstClock> {
        vec![FirstClock { worker: WorkerId(1), incarnation: 7, clock }]
    }

    #[test]
    fn workers_hear_of_a_change_when_everybody_has_entered_it() {
        let mut epochs = epochs();
        // It is waited for once it has caught up.
        epochs.aggregator_entered(NOW, AggregatorId(1), 0, &[]);
        epochs.aggregator_entered(NOW, AggregatorId(0), 1, &[]);
        assert!(!epochs.are_ready());
        (0..2).for_each(|server| epochs.shard_entered(NOW, shard(server), 1, &[]));
        assert!(epochs.are_ready(), "a job starts without its aggregators");
        let change = Change::Policy(PolicyOverride::new("*", Policies::default()));
        epochs.make(NOW, change.clone(), 0);
        epochs.shard_entered(NOW, shard(0), 2, &[]);
        // A shard repeats an earlier answer.
        epochs.shard_entered(NOW, shard(0), 1, &[]);
        epochs.shard_entered(NOW, shard(1), u32::MAX, &[]);
        assert_eq!(epochs.poll_settled(), None, "the aggregator is behind");
        assert_eq!(epochs.why_unsettled().as_deref(), Some("aggregator 0 has not entered epoch 2 yet"));
        epochs.forget_aggregator(AggregatorId(0));
        assert_eq!(epochs.poll_settled(), Some((2, change)));
        assert_eq!((epochs.poll_settled(), epochs.settled()), (None, epochs.newest()));
        epochs.make(NOW, Change::Left { worker: WorkerId(0) }, 0);
        assert_eq!(epochs.poll_settled(), None, "an epoch that was not there yet cannot have been entered");
        assert_eq!(epochs.check(), Ok(()));
    }

    #[test]
    fn the_first_clock_is_the_latest_of_all_shards() {
        let mut epochs = epochs();
        let worker = WorkerId(1);
        epochs.make(NOW, Change::Joining { worker, incarnation: 7 }, 2);
        epochs.shard_entered(NOW, shard(0), 2, &first(5));
        assert_eq!(epochs.poll_joined(), None);
        let other = FirstClock { incarnation: 6, ..first(90)[0] };
        epochs.shard_entered(NOW, shard(1), 2, &[other]);
        assert_eq!(epochs.poll_joined(), None, "another process is spoken of");
        epochs.shard_entered(NOW, shard(1), 2, &first(3));
        let joined = Change::Joined { worker, clock: 5 };
        assert_eq!(epochs.poll_joined(), Some(joined.clone()));
        epochs.make(NOW, joined, 0);
        assert_eq!(epochs.poll_joined(), None);
        assert_eq!(epochs.check(), Ok(()));
    }

    #[test]
    fn the_first_clock_is_after_what_aggregators_hold() {
        let mut epochs = epochs();
        let worker = WorkerId(1);
        (0..2).for_each(|id| epochs.aggregator_entered(NOW, AggregatorId(id), 1, &[]));
        epochs.make(NOW, Change::Joining { worker, incarnation: 7 }, 0);
        (0..2).for_each(|server| epochs.shard_entered(NOW, shard(server), 2, &first(3)));
        epochs.aggregator_entered(NOW, AggregatorId(0), 2, &first(6));
        assert_eq!(epochs.poll_joined(), None, "an aggregator has not answered");
        epochs.forget_aggregator(AggregatorId(1));
        assert_eq!(epochs.poll_joined(), Some(Change::Joined { worker, clock: 6 }));
    }

    #[test]
    fn a_worker_that_dies_while_it_joins_is_not_waited_for() {
        let mut epochs = epochs();
        let worker = WorkerId(1);
        epochs.make(NOW, Change::Joining { worker, incarnation: 7 }, 0);
        epochs.shard_entered(NOW, shard(0), 2, &first(5));
        epochs.make(NOW, Change::Left { worker }, 0);
        epochs.shard_entered(NOW, shard(1), 2, &first(5));
        assert_eq!(epochs.poll_joined(), None);
        assert_eq!(epochs.check(), Ok(()));
    }

    #[test]
    fn an_aggregator_that_does_not_follow_is_overdue() {
        let (mut epochs, standstill, grace) = (epochs(), Standstill::default(), Duration::from_secs(10));
        let (id, change) =
            (AggregatorId(3), || Change::Policy(PolicyOverride::new("*", Policies::default())));
        epochs.aggregator_entered(Time::ZERO, id, 1, &[]);
        let late = NOW + grace;
        assert_eq!(epochs.overdue(late, grace, &standstill), [], "nothing is new");
        assert_eq!(epochs.next_deadline(grace, &standstill), None);
        (0..2).for_each(|_| drop(epochs.make(NOW, change(), 0)));
        assert_eq!(epochs.next_deadline(grace, &standstill), Some(late));
        assert_eq!(epochs.overdue(late, grace, &standstill), [(id, 2)]);
        // It has until then for the next one again.
        epochs.aggregator_entered(NOW + Duration::from_secs(1), id, 2, &[]);
        assert_eq!(epochs.overdue(late, grace, &standstill), []);
        assert_eq!(epochs.overdue(late + Duration::from_secs(1), grace, &standstill), [(id, 3)]);
        epochs.forget_aggregator(id);
        epochs.aggregator_entered(NOW, id, 2, &[]);
        assert_eq!(epochs.next_deadline(grace, &standstill), None, "it has not caught up");
    }

    #[test]
    fn those_who_are_behind_are_named() {
        let mut epochs = epochs();
        let names = "server 0 core 0 and server 1 core 0 have not entered epoch 1 yet";
        assert_eq!(epochs.behind(1).as_deref(), Some(names));
        assert_eq!(epochs.why_not_joined(WorkerId(0), 1), None, "the job begins with it");
        (0..2).for_each(|server| epochs.shard_entered(NOW, shard(server), 1, &[]));
        assert_eq!(epochs.behind(1), None);
        (0..9).for_each(|id| epochs.aggregator_entered(NOW, AggregatorId(id), 1, &[]));
        let behind = epochs.behind(2).unwrap();
        assert!(behind.ends_with(" and 8 others have not entered epoch 2 yet"), "{behind}");
        epochs.make(NOW, Change::Joining { worker: WorkerId(1), incarnation: 7 }, 0);
        assert_eq!(epochs.why_not_joined(WorkerId(1), 7), Some(behind));
        assert_eq!(epochs.why_not_joined(WorkerId(1), 6), None, "that is another process");
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let mut epochs = epochs();
        epochs.settled.epoch += 1;
        assert!(epochs.check().is_err(), "nothing leads from one plan to the other");
        let mut epochs = self::epochs();
        epochs.make(NOW, Change::Left { worker: WorkerId(0) }, 0);
        epochs.newest.seed += 1;
        assert!(epochs.check().is_err(), "the change leads to another plan");
        let mut epochs = self::epochs();
        epochs.make(NOW, Change::Joining { worker: WorkerId(1), incarnation: 7 }, 2);
        epochs.newest = epochs.settled.clone();
        epochs.unsettled.clear();
        assert!(epochs.check().is_err(), "nobody joins");
    }
}
