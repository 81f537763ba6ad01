//! Partial pulling (PSP-SGD, Algorithm 1, worker): go on `tau2` after the fraction `b` of the blocks arrived.
//!
//! A block is one table's part on one shard. Blocks count for the iteration that they were asked for, and only if they were: a
//! table that is not pulled holds up nobody. Blocks under the same `b` and `tau2` count together, and the worker goes on when it
//! has enough of every such group.

use crate::consistency::PartialPull;
use crate::types::{Clock, ShardId, Time};
use std::collections::BTreeMap;
use std::time::Duration;

/// The part of a table that one shard has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockId {
    pub(super) table: usize,
    pub(super) shard: ShardId,
}

/// When a worker may go on although blocks are missing.
#[derive(Debug, Default)]
pub(super) struct PartialPulls {
    /// Iterations that the application has completed: nothing is waited for on account of earlier ones.
    clock: Clock,
    /// By the iteration that blocks were asked for: the one at hand, and the next one once it is pushed for.
    gates: BTreeMap<Clock, Gate>,
}

/// The blocks that were asked for one iteration.
#[derive(Debug, Default)]
struct Gate {
    blocks: BTreeMap<BlockId, Block>,
    groups: Vec<Group>,
    is_open: bool,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    group: usize,
    has_arrived: bool,
}

/// Blocks under the same rule.
#[derive(Debug, Clone, Copy)]
struct Group {
    rule: PartialPull,
    blocks: usize,
    arrived: usize,
    enough_since: Option<Time>,
}

impl PartialPulls {
    /// A block is asked for, for the iteration after `clock`. What is expected later than others counts with them: the worker may
    /// have to wait again.
    pub(super) fn expect(&mut self, now: Time, clock: Clock, id: BlockId, rule: PartialPull) {
        let gate = self.gates.entry(clock).or_default();
        gate.remove(id);
        gate.insert(id, rule, false);
        gate.judge(now);
    }

    /// A shard answered a request for the iteration after `clock` with this version of a block. That may be enough for the iteration
    /// after it as well.
    pub(super) fn arrived(&mut self, now: Time, clock: Clock, id: BlockId, version: Clock) {
        let gates = self.gates.iter_mut().filter(|(of, _)| **of == clock || **of <= version);
        gates.for_each(|(_, gate)| gate.arrived(now, id));
    }

    /// A block will not come.
    pub(super) fn forget(&mut self, now: Time, clock: Clock, id: BlockId) {
        if let Some(gate) = self.gates.get_mut(&clock) {
            gate.remove(id);
            gate.judge(now);
        }
    }

    /// Other rules may hold for blocks that are under way; without one, all of them are waited for.
    pub(super) fn follow(&mut self, now: Time, rule_of: impl Fn(BlockId) -> Option<PartialPull>) {
        let all = PartialPull { fraction: 1.0, tau2: Duration::ZERO };
        for gate in self.gates.values_mut() {
            gate.groups.clear();
            for (id, block) in std::mem::take(&mut gate.blocks) {
                gate.insert(id, rule_of(id).unwrap_or(all), block.has_arrived);
            }
            gate.judge(now);
        }
    }

    /// A new iteration begins.
    pub(super) fn turn(&mut self, clock: Clock) {
        self.clock = self.clock.max(clock);
        self.gates.retain(|of, _| *of >= self.clock);
    }

    /// Opens gates whose `tau2` is over.
    pub(super) fn handle_timeout(&mut self, now: Time) {
        self.gates.values_mut().filter(|gate| !gate.is_open).for_each(|gate| gate.judge(now));
    }

    /// Whether a pull for the iteration after `clock` need not wait for its missing blocks.
    pub(super) fn is_open(&self, clock: Clock) -> bool {
        clock < self.clock || self.gates.get(&clock).is_some_and(|gate| gate.is_open)
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.gates.values().filter(|gate| !gate.is_open).filter_map(Gate::opens_at).min()
    }
}

impl Gate {
    fn insert(&mut self, id: BlockId, rule: PartialPull, has_arrived: bool) {
        let group = self.groups.iter().position(|group| group.rule == rule).unwrap_or_else(|| {
            self.groups.push(Group { rule, blocks: 0, arrived: 0, enough_since: None });
            self.groups.len() - 1
        });
        self.groups[group].blocks += 1;
        self.groups[group].arrived += usize::from(has_arrived);
        self.blocks.insert(id, Block { group, has_arrived });
    }

    fn remove(&mut self, id: BlockId) {
        if let Some(Block { group, has_arrived }) = self.blocks.remove(&id) {
            self.groups[group].blocks -= 1;
            self.groups[group].arrived -= usize::from(has_arrived);
        }
    }

    fn arrived(&mut self, now: Time, id: BlockId) {
        let Some(block) = self.blocks.get_mut(&id).filter(|block| !block.has_arrived) else { return };
        block.has_arrived = true;
        self.groups[block.group].arrived += 1;
        self.judge(now);
    }

    fn judge(&mut self, now: Time) {
        self.groups.iter_mut().for_each(|group| group.note_enough(now));
        self.is_open = self.opens_at().is_some_and(|at| at <= now);
    }

    /// When it opens by what is here; `None` while blocks have to come.
    fn opens_at(&self) -> Option<Time> {
        self.groups.iter().map(Group::opens_at).try_fold(Time::ZERO, |latest, at| Some(latest.max(at?)))
    }
}

impl Group {
    fn note_enough(&mut self, now: Time) {
        // The small margin keeps 0.9 of 10 blocks at 9 although 0.9 * 10.0 may round above it.
        let needed = (self.rule.fraction * self.blocks as f64 - 1e-9).ceil() as usize;
        self.enough_since = if self.arrived >= needed { self.enough_since.or(Some(now)) } else { None };
    }

    /// All blocks open it at once.
    fn opens_at(&self) -> Option<Time> {
        let wait = if self.arrived == self.blocks { Duration::ZERO } else { self.rule.tau2 };
        self.enough_since.map(|since| since + wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::ServerId;

    fn at(milliseconds: u64) -> Time {
        Time(milliseconds * 1_000_000)
    }

    fn block(table: usize, server: u32) -> BlockId {
        BlockId { table, shard: ShardId { server: ServerId(server), core: 0 } }
    }

    fn rule(fraction: f64, tau2_ms: u64) -> PartialPull {
        PartialPull { fraction, tau2: Duration::from_millis(tau2_ms) }
    }

    /// A table's blocks on so many servers are asked for.
    fn expect(pulls: &mut PartialPulls, clock: Clock, table: usize, servers: u32, rule: PartialPull) {
        (0..servers).for_each(|server| pulls.expect(at(0), clock, block(table, server), rule));
    }

    fn arrive(
        pulls: &mut PartialPulls,
        now: Time,
        clock: Clock,
        table: usize,
        servers: std::ops::Range<u32>,
    ) {
        servers.for_each(|server| pulls.arrived(now, clock, block(table, server), clock));
    }

    #[test]
    fn tau2_runs_from_the_block_that_made_it_enough() {
        let mut pulls = PartialPulls::default();
        expect(&mut pulls, 1, 0, 10, rule(0.9, 20));
        arrive(&mut pulls, at(5), 1, 0, 0..8);
        assert_eq!((pulls.is_open(1), pulls.next_timeout()), (false, None));
        arrive(&mut pulls, at(10), 1, 0, 8..9);
        assert_eq!((pulls.is_open(1), pulls.next_timeout()), (false, Some(at(30))));
        pulls.handle_timeout(Time(at(30).0 - 1));
        assert!(!pulls.is_open(1), "just before the boundary");
        pulls.handle_timeout(at(30));
        assert_eq!((pulls.is_open(1), pulls.next_timeout()), (true, None), "at the boundary");
    }

    #[test]
    fn all_blocks_open_it_at_once() {
        let mut pulls = PartialPulls::default();
        expect(&mut pulls, 1, 0, 10, rule(0.9, 20));
        arrive(&mut pulls, at(5), 1, 0, 0..10);
        assert_eq!((pulls.is_open(1), pulls.next_timeout()), (true, None));
    }

    #[test]
    fn without_tau2_enough_is_enough() {
        let mut pulls = PartialPulls::default();
        expect(&mut pulls, 1, 0, 10, rule(0.9, 0));
        arrive(&mut pulls, at(5), 1, 0, 0..9);
        assert!(pulls.is_open(1));
    }

    #[test]
    fn an_iteration_that_is_over_is_open_and_the_next_one_counts_anew() {
        let mut pulls = PartialPulls::default();
        expect(&mut pulls, 1, 0, 10, rule(0.9, 20));
        arrive(&mut pulls, at(5), 1, 0, 0..9);
        // The application pushes before it turns its clock.
        expect(&mut pulls, 2, 0, 10, rule(0.9, 20));
        assert!(!pulls.is_open(1) && !pulls.is_open(2));
        pulls.turn(2);
        assert!(pulls.is_open(1) && !pulls.is_open(2));
        assert_eq!(pulls.next_timeout(), None);
        assert!(!pulls.is_open(3), "nothing of it was asked for");
    }

    #[test]
    fn a_fraction_is_of_what_was_asked_for() {
        let mut pulls = PartialPulls::default();
        expect(&mut pulls, 1, 0, 2, rule(0.5, 0));
        arrive(&mut pulls, at(1), 1, 0, 0..1);
        assert!(pulls.is_open(1), "the other tables are not pulled");
        // Now they are: two of six blocks are not half.
        expect(&mut pulls, 1, 1, 4, rule(0.5, 0));
        arrive(&mut pulls, at(2), 1, 1, 0..1);
        assert!(!pulls.is_open(1));
        arrive(&mut pulls, at(2), 1, 1, 0..1);
        assert!(!pulls.is_open(1), "a block counts once");
        arrive(&mut pulls, at(3), 1, 1, 1..2);
        assert!(pulls.is_open(1));
        // One that will not come counts no more, and neither does one that is asked for again.
        pulls.expect(at(4), 1, block(0, 0), rule(0.5, 0));
        assert!(!pulls.is_open(1));
        pulls.forget(at(5), 1, block(1, 3));
        pulls.forget(at(5), 1, block(1, 2));
        assert!(pulls.is_open(1), "two of four");
    }

    #[test]
    fn each_rule_holds_for_its_own_blocks() {
        let mut pulls = PartialPulls::default();
        expect(&mut pulls, 1, 0, 4, rule(0.5, 0));
        expect(&mut pulls, 1, 1, 2, rule(0.9, 20));
        arrive(&mut pulls, at(1), 1, 0, 0..4);
        assert!(!pulls.is_open(1), "none of the second table is here");
        arrive(&mut pulls, at(2), 1, 1, 0..1);
        assert!(!pulls.is_open(1));
        // A server of the second table gets a rule of its own.
        let of_server = |id: BlockId| (id.table == 0 || id.shard.server.0 == 1).then_some(rule(0.5, 30));
        pulls.follow(at(3), of_server);
        assert_eq!((pulls.is_open(1), pulls.next_timeout()), (false, Some(at(33))));
        pulls.handle_timeout(at(33));
        assert!(pulls.is_open(1));
    }

    #[test]
    fn a_block_of_a_later_version_is_one_for_the_next_iteration_too() {
        let mut pulls = PartialPulls::default();
        expect(&mut pulls, 1, 0, 2, rule(0.5, 0));
        pulls.turn(2);
        expect(&mut pulls, 2, 0, 2, rule(0.5, 0));
        pulls.arrived(at(1), 1, block(0, 0), 1);
        assert!(!pulls.is_open(2), "it is too old");
        pulls.arrived(at(1), 1, block(0, 0), 2);
        assert!(pulls.is_open(2));
    }
}
