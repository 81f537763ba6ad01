//! Which shards are to move: when servers come or go, when one of them stays overloaded, and when somebody asks for it.
//!
//! The moves themselves are [`crate::placement::moves`]' choice. Without an order they are decided once for a set of servers, and for the
//! sizes of shards, which do not change: nothing moves to and fro. What shards carry is compared only over long windows.

use crate::limits;
use crate::placement::moves::{Move, Slice, bytes_of, moves};
use crate::types::{ProcessId, ShardId, Time};
use crate::wire::{Plan, ServedShard};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Windows in a row after which a server counts as overloaded.
const WINDOWS: usize = 3;

/// Where shards are to be served.
#[derive(Debug, Default)]
pub(super) struct Balance {
    /// Bytes of parameters in each shard.
    sizes: BTreeMap<ShardId, u64>,
    traffic: Traffic,
    /// What each shard carried when that was last decided by; its size counts before.
    loads: Option<BTreeMap<ShardId, u64>>,
    /// The servers that places were decided for.
    decided_for: BTreeSet<ProcessId>,
    /// Shards that are to be served by other processes than now.
    wanted: BTreeMap<ShardId, ProcessId>,
}

impl Balance {
    /// The shards of a job that begins, or goes on after a restart of its coordinator: they stay where they are.
    pub(super) fn begin(&mut self, plan: &Plan) {
        self.sizes = plan.shards.iter().map(|served| (served.shard, 0)).collect();
        for chunk in plan.chunks().iter().flatten() {
            let size = self.sizes.entry(chunk.shard).or_default();
            *size += u64::from(chunk.len) * size_of::<f32>() as u64;
        }
        self.decided_for = plan.shards.iter().map(|served| served.process).collect();
    }

    /// A shard has carried so many bytes since the job began.
    pub(super) fn note_traffic(&mut self, now: Time, shard: ShardId, bytes: u64) {
        self.traffic.note(now, shard, bytes);
    }

    /// A shard is served by another process, which counts anew.
    pub(super) fn note_moved(&mut self, now: Time, shard: ShardId) {
        self.wanted.remove(&shard);
        self.traffic.restart(now);
    }

    /// The next shard that is to move, and where to, of those that servers which are here may serve.
    pub(super) fn next(
        &mut self,
        plan: &Plan,
        servers: &BTreeSet<ProcessId>,
    ) -> Option<(ServedShard, ProcessId)> {
        if servers.is_empty() {
            return None;
        }
        if self.decided_for != *servers {
            self.decided_for.clone_from(servers);
            let loads = self.loads.as_ref().unwrap_or(&self.sizes);
            self.wanted = self.decide(plan, servers, loads).0;
        } else if self.wanted.is_empty()
            && let Some(loads) = self.traffic.overload(plan, servers)
        {
            let (wanted, _) = self.decide(plan, servers, &loads);
            let before = peak(&loads, plan, servers, &BTreeMap::new());
            let after = peak(&loads, plan, servers, &wanted);
            // Moving shards costs more than it brings where the most loaded server stays about as loaded.
            if u128::from(after) * 10 <= u128::from(before) * 9 {
                (self.wanted, self.loads) = (wanted, Some(loads));
            }
        }
        self.wanted.retain(|shard, to| plan.served(*shard).is_some_and(|served| served.process != *to));
        let (shard, to) = self.wanted.first_key_value()?;
        Some((plan.served(*shard)?.clone(), *to))
    }

    /// Shards are to be spread anew, by what they carry as far as that is known. How many move, and how many bytes.
    pub(super) fn ask(&mut self, plan: &Plan, servers: &BTreeSet<ProcessId>) -> (usize, u64) {
        self.loads = self.traffic.known().or(self.loads.take());
        let loads = self.loads.as_ref().unwrap_or(&self.sizes);
        let (wanted, bytes) = self.decide(plan, servers, loads);
        self.decided_for.clone_from(servers);
        self.wanted = wanted;
        (self.wanted.len(), bytes)
    }

    /// Where a shard is to be served instead of where it is.
    pub(super) fn wanted(&self, shard: ShardId) -> Option<ProcessId> {
        self.wanted.get(&shard).copied()
    }

    /// How many shards are to move.
    pub(super) fn wanted_count(&self) -> usize {
        self.wanted.len()
    }

    /// Which shards are to move where, and what that takes.
    fn decide(
        &self,
        plan: &Plan,
        servers: &BTreeSet<ProcessId>,
        loads: &BTreeMap<ShardId, u64>,
    ) -> (BTreeMap<ShardId, ProcessId>, u64) {
        let processes: Vec<ProcessId> = servers.iter().copied().collect();
        let number = |process: ProcessId| processes.iter().position(|known| *known == process);
        let slice = |served: &ServedShard| Slice {
            at: number(served.process),
            copy: served.copy.and_then(|copy| number(copy.process)),
            load: loads.get(&served.shard).copied().unwrap_or(0),
            bytes: self.sizes.get(&served.shard).copied().unwrap_or(0),
        };
        let slices: Vec<Slice> = plan.shards.iter().map(slice).collect();
        let found = moves(&slices, processes.len());
        let bytes = bytes_of(&slices, &found);
        let place = |step: Move| (plan.shards[step.slice].shard, processes[step.to]);
        (found.into_iter().map(place).collect(), bytes)
    }
}

/// The load of the most loaded server once shards are where they are wanted.
fn peak(
    loads: &BTreeMap<ShardId, u64>,
    plan: &Plan,
    servers: &BTreeSet<ProcessId>,
    wanted: &BTreeMap<ShardId, ProcessId>,
) -> u64 {
    sums(loads, plan, servers, wanted).into_values().max().unwrap_or(0)
}

/// The load of every server.
fn sums(
    loads: &BTreeMap<ShardId, u64>,
    plan: &Plan,
    servers: &BTreeSet<ProcessId>,
    wanted: &BTreeMap<ShardId, ProcessId>,
) -> BTreeMap<ProcessId, u64> {
    let mut sums: BTreeMap<ProcessId, u64> = servers.iter().map(|process| (*process, 0)).collect();
    for served in &plan.shards {
        let process = wanted.get(&served.shard).unwrap_or(&served.process);
        *sums.entry(*process).or_default() += loads.get(&served.shard).copied().unwrap_or(0);
    }
    sums
}

/// What shards carry, in windows of [`limits::LOAD_WINDOW`].
#[derive(Debug, Default)]
struct Traffic {
    /// When this window began, and what shards had carried by then.
    began: Option<Time>,
    before: BTreeMap<ShardId, u64>,
    /// What they have carried.
    latest: BTreeMap<ShardId, u64>,
    /// The last windows that are over.
    windows: VecDeque<BTreeMap<ShardId, u64>>,
    /// One is over that nobody has looked at.
    is_new: bool,
}

impl Traffic {
    fn note(&mut self, now: Time, shard: ShardId, bytes: u64) {
        let began = *self.began.get_or_insert(now);
        // What a shard carried before it was heard of first is not known to be of this window.
        self.before.entry(shard).or_insert(bytes);
        self.latest.insert(shard, bytes);
        if now.since(began) >= limits::LOAD_WINDOW {
            let window = self.present();
            self.windows.push_back(window);
            if self.windows.len() > WINDOWS {
                self.windows.pop_front();
            }
            (self.began, self.is_new) = (Some(now), true);
            self.before.clone_from(&self.latest);
        }
    }

    /// What this window has brought so far.
    fn present(&self) -> BTreeMap<ShardId, u64> {
        let carried = |(shard, bytes): (&ShardId, &u64)| {
            (*shard, bytes.saturating_sub(self.before.get(shard).copied().unwrap_or(*bytes)))
        };
        self.latest.iter().map(carried).collect()
    }

    fn restart(&mut self, now: Time) {
        *self = Traffic { began: Some(now), ..Traffic::default() };
    }

    /// What shards carried in whole windows; `None` before the first, and where that is nothing.
    fn known(&self) -> Option<BTreeMap<ShardId, u64>> {
        let mut loads = BTreeMap::new();
        for (shard, bytes) in self.windows.iter().flatten() {
            *loads.entry(*shard).or_insert(0u64) += bytes;
        }
        Some(loads).filter(|loads| loads.values().any(|bytes| *bytes > 0))
    }

    /// What shards carried, if one server carried too much of it in all of the last windows. Every window is looked at once.
    fn overload(&mut self, plan: &Plan, servers: &BTreeSet<ProcessId>) -> Option<BTreeMap<ShardId, u64>> {
        if !std::mem::take(&mut self.is_new) || self.windows.len() < WINDOWS || servers.len() < 2 {
            return None;
        }
        let overloaded = |window: &BTreeMap<ShardId, u64>| -> BTreeSet<ProcessId> {
            let sums = sums(window, plan, servers, &BTreeMap::new());
            let total: u64 = sums.values().sum();
            // More than five quarters of an equal share.
            let is_over = |sum: u64| u128::from(sum) * sums.len() as u128 * 4 > u128::from(total) * 5;
            sums.iter().filter(|(_, sum)| is_over(**sum)).map(|(process, _)| *process).collect()
        };
        let mut all = self.windows.iter().map(overloaded);
        let first = all.next()?;
        let always = all.fold(first, |some, more| &some & &more);
        if always.is_empty() { None } else { self.known() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Part;
    use crate::policy::Policy;
    use crate::table::TableSpec;
    use crate::types::{ServerId, WorkerId};
    use crate::wire::{Change, Member};
    use std::time::Duration;

    const SHARDS: u32 = 6;

    fn shard(core: u32) -> ShardId {
        ShardId { server: ServerId(0), core }
    }

    /// One server of six data cores with a table of equal shares.
    fn plan() -> Plan {
        let served = |core| ServedShard::original(shard(core), ProcessId(1), "host:1".into());
        Plan {
            epoch: Plan::FIRST_EPOCH,
            tables: vec![TableSpec::dense("w", [6 * 81_920])],
            parts: vec![vec![Part { server: ServerId(0), start: 0, len: 6 * 81_920 }]],
            whole: vec![],
            shards: (0..SHARDS).map(served).collect(),
            workers: 1,
            members: vec![Member::original(WorkerId(0), 1)],
            policy: Policy::default(),
            overrides: vec![],
            switches: vec![],
            seed: 0,
            resumed: None,
        }
    }

    fn begun(plan: &Plan) -> Balance {
        let mut balance = Balance::default();
        balance.begin(plan);
        balance
    }

    fn servers(processes: &[u64]) -> BTreeSet<ProcessId> {
        processes.iter().copied().map(ProcessId).collect()
    }

    /// Carries out all moves. Returns how many there were.
    fn carry_out(balance: &mut Balance, plan: &mut Plan, processes: &[u64]) -> usize {
        let mut moved = 0;
        while let Some((served, to)) = balance.next(plan, &servers(processes)) {
            assert_ne!(served.process, to);
            let change = Change::Served {
                shard: served.shard,
                process: to,
                addresses: served.addresses.clone(),
                copy: None,
            };
            plan.apply(plan.epoch + 1, &change);
            moved += 1;
            assert!(moved <= 2 * SHARDS as usize, "moves do not come to an end");
        }
        moved
    }

    fn served_by(plan: &Plan, process: u64) -> usize {
        plan.shards.iter().filter(|served| served.process == ProcessId(process)).count()
    }

    /// Reports of windows in which shards carry so much each. Returns the time and the totals.
    struct Reports {
        now: Time,
        totals: BTreeMap<ShardId, u64>,
    }

    impl Reports {
        fn new(balance: &mut Balance) -> Reports {
            let totals: BTreeMap<ShardId, u64> = (0..SHARDS).map(|core| (shard(core), 0)).collect();
            totals.keys().for_each(|id| balance.note_traffic(Time::ZERO, *id, 0));
            Reports { now: Time::ZERO, totals }
        }

        /// A window goes by.
        fn window(&mut self, balance: &mut Balance, carried: impl Fn(u32) -> u64) {
            for _ in 0..20 {
                self.now = self.now + Duration::from_millis(500);
                for (id, total) in &mut self.totals {
                    *total += carried(id.core);
                    balance.note_traffic(self.now, *id, *total);
                }
            }
        }
    }

    #[test]
    fn servers_that_come_and_go_get_equal_shares() {
        let mut plan = plan();
        let mut balance = begun(&plan);
        assert_eq!(carry_out(&mut balance, &mut plan, &[1]), 0);
        assert_eq!(carry_out(&mut balance, &mut plan, &[1, 2]), 3);
        assert_eq!(carry_out(&mut balance, &mut plan, &[1, 2, 3]), 2);
        assert_eq!([1, 2, 3].map(|process| served_by(&plan, process)), [2, 2, 2]);
        // The second is drained.
        assert_eq!(carry_out(&mut balance, &mut plan, &[1, 3]), 2);
        assert_eq!([1, 2, 3].map(|process| served_by(&plan, process)), [3, 0, 3]);
        assert_eq!(balance.wanted_count(), 0);
    }

    #[test]
    fn a_job_begins_as_its_placement_says_however_uneven() {
        let mut plan = plan();
        plan.shards[5].process = ProcessId(2);
        let mut balance = begun(&plan);
        assert_eq!(carry_out(&mut balance, &mut plan, &[1, 2]), 0);
        // Asked for, they are spread.
        assert_eq!(balance.ask(&plan, &servers(&[1, 2])), (2, 2 * 81_920 * 4));
        assert_eq!(carry_out(&mut balance, &mut plan, &[1, 2]), 2);
    }

    #[test]
    fn a_server_that_stays_overloaded_loses_shards_and_a_passing_load_moves_nothing() {
        let mut plan = plan();
        let mut balance = begun(&plan);
        carry_out(&mut balance, &mut plan, &[1, 2]);
        let first: Vec<u32> =
            plan.shards.iter().filter(|s| s.process == ProcessId(1)).map(|s| s.shard.core).collect();
        let hot = |core: u32| if first.contains(&core) { 900 } else { 100 };
        let mut reports = Reports::new(&mut balance);
        for window in 0..3 {
            // In the second window all carry the same.
            reports.window(&mut balance, |core| if window == 1 { 500 } else { hot(core) });
            assert_eq!(carry_out(&mut balance, &mut plan, &[1, 2]), 0, "window {window}");
        }
        reports.window(&mut balance, hot);
        assert_eq!(carry_out(&mut balance, &mut plan, &[1, 2]), 0, "two in a row");
        reports.window(&mut balance, hot);
        let moved = carry_out(&mut balance, &mut plan, &[1, 2]);
        assert_eq!((moved, served_by(&plan, 1)), (1, 2), "1800 and 1200 of 3000");
        // It is as even as it can be: though one carries more, nothing moves again.
        for _ in 0..10 {
            reports.window(&mut balance, hot);
            assert_eq!(carry_out(&mut balance, &mut plan, &[1, 2]), 0);
        }
        // A third server gets its share of what shards carry, not of their number.
        assert_eq!(carry_out(&mut balance, &mut plan, &[1, 2, 3]), 3);
        let carried = |process| -> u64 {
            let own = plan.shards.iter().filter(|served| served.process == ProcessId(process));
            own.map(|served| hot(served.shard.core)).sum()
        };
        assert_eq!([1, 2, 3].map(carried), [1000; 3]);
    }

    #[test]
    fn one_shard_that_carries_nearly_all_has_a_server_to_itself() {
        let mut plan = plan();
        let mut balance = begun(&plan);
        carry_out(&mut balance, &mut plan, &[1, 2]);
        let hottest = plan.shards.iter().find(|s| s.process == ProcessId(1)).unwrap().shard.core;
        let mut reports = Reports::new(&mut balance);
        let carried = |core: u32| if core == hottest { 1000 } else { 100 };
        for _ in 0..3 {
            reports.window(&mut balance, carried);
        }
        assert_eq!(carry_out(&mut balance, &mut plan, &[1, 2]), 2);
        assert_eq!(served_by(&plan, 1), 1);
        for _ in 0..6 {
            reports.window(&mut balance, carried);
            assert_eq!(carry_out(&mut balance, &mut plan, &[1, 2]), 0);
        }
    }
}
