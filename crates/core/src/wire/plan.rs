//! The plan: members, placement and policies of a job, and its changes.

use super::bounded::sequence;
use crate::address::Addresses;
use crate::checkpoint::Resumed;
use crate::limits;
use crate::placement::Part;
use crate::policy::{Policy, PolicyOverride};
use crate::status::PackNames;
use crate::table::{Chunk, TableSpec, chunks, chunks_at_most, repeated_name, tables};
use crate::types::{Clock, CopyId, ProcessId, ServerId, ShardId, TableId, WorkerId};
use serde::{Deserialize, Serialize};

/// Shards in one job.
const MAX_SHARDS: usize = (limits::MAX_SERVERS * limits::MAX_CORES) as usize;

/// The members, the placement of parameters and the policies in one epoch of a job.
///
/// A plan goes from one epoch to the next by [`Plan::apply`]. Every trace that a change leaves names the epoch that it was made
/// in, so that [`Plan::changes_to`] finds the difference between any two epochs of a job.
///
/// Chunks follow from it: [`crate::table::chunks`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Counts changes, from [`Plan::FIRST_EPOCH`].
    pub epoch: u32,
    /// The tables in creation order.
    #[serde(deserialize_with = "tables")]
    pub tables: Vec<TableSpec>,
    /// The parts of each table.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_TABLES }>")]
    pub parts: Vec<Vec<Part>>,
    /// Tables that are on one shard each, ascending: the policies that the job began with need their layers whole.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_TABLES }>")]
    pub whole: Vec<TableId>,
    /// Every shard with the process that serves it, ordered by shard.
    #[serde(deserialize_with = "sequence::<_, _, MAX_SHARDS>")]
    pub shards: Vec<ServedShard>,
    /// Workers that the job was set up for.
    pub workers: u32,
    /// Every rank that was ever taken, ordered, with its last incarnation. A worker is told of itself only.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    pub members: Vec<Member>,
    /// The job's policy.
    pub policy: Policy,
    /// Exceptions from it, made when the job was set up.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_OVERRIDES }>")]
    pub overrides: Vec<PolicyOverride>,
    /// Exceptions from these, made while the job runs, ordered by epoch.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_OVERRIDES }>")]
    pub switches: Vec<Switch>,
    /// The job's seed.
    pub seed: u64,
    /// The checkpoint that the job goes on from.
    pub resumed: Option<Resumed>,
}

/// A shard, which is what parameters are placed on, and the process that serves it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedShard {
    /// The shard. Its number is the same in every epoch.
    pub shard: ShardId,
    /// The process that holds its parameters.
    pub process: ProcessId,
    /// Addresses of that process.
    pub addresses: Addresses,
    /// The copy that has everything that this process has acknowledged: it can take over.
    pub copy: Option<CopyId>,
    /// The epoch in which this last changed.
    pub since: u32,
}

impl ServedShard {
    /// A shard as a job begins with it.
    pub fn original(shard: ShardId, process: ProcessId, addresses: Addresses) -> ServedShard {
        ServedShard { shard, process, addresses, copy: None, since: Plan::FIRST_EPOCH }
    }

    /// The change that makes a plan say this.
    pub fn change(&self) -> Change {
        let ServedShard { shard, process, addresses, copy, since: _ } = self.clone();
        Change::Served { shard, process, addresses, copy }
    }
}

/// One rank's latest incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its rank.
    pub worker: WorkerId,
    /// Which process has the rank: drawn anew for each, so that frames of an earlier one do not count for it.
    pub incarnation: u64,
    /// Whether it takes part.
    pub standing: Standing,
    /// The epoch in which its standing last changed.
    pub since: u32,
}

/// Whether a member takes part, and from which clock on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// It will; the shards are asked which clock can be its first.
    Joining,
    /// It owes pushes from this clock on.
    From(Clock),
    /// It left or died.
    Left,
}

impl Member {
    /// A worker that the job begins with.
    pub fn original(worker: WorkerId, incarnation: u64) -> Member {
        Member { worker, incarnation, standing: Standing::From(0), since: Plan::FIRST_EPOCH }
    }

    /// The same in a job that begins with this clock.
    pub fn from_clock(self, clock: Clock) -> Member {
        Member { standing: Standing::From(clock), ..self }
    }

    /// Whether it takes part, or is about to.
    pub fn is_live(&self) -> bool {
        self.standing != Standing::Left
    }

    /// Whether it takes part: the clock of its first push is known.
    pub fn takes_part(&self) -> bool {
        matches!(self.standing, Standing::From(_))
    }
}

/// A policy that was changed while the job ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Switch {
    /// The epoch that it made.
    pub epoch: u32,
    /// The policies that hold from then on.
    pub rule: PolicyOverride,
}

/// The difference between one epoch of a job and the one before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Change {
    /// A worker joins: no round after the open ones closes without it, nor an open one that nobody has begun.
    Joining {
        /// Its rank; an earlier incarnation has left.
        worker: WorkerId,
        /// Which process it is.
        incarnation: u64,
    },
    /// The joining worker's first clock is known: it owes nothing before it.
    Joined {
        /// Its rank.
        worker: WorkerId,
        /// The first clock that it pushes.
        clock: Clock,
    },
    /// A worker left or died.
    Left {
        /// Its rank.
        worker: WorkerId,
    },
    /// Policies of some tables change.
    Policy(PolicyOverride),
    /// A shard is served by this process from now on, or another process keeps its copy.
    Served {
        /// The shard.
        shard: ShardId,
        /// The process that serves it.
        process: ProcessId,
        /// Addresses of that process.
        addresses: Addresses,
        /// The copy that can take over.
        copy: Option<CopyId>,
    },
}

impl Change {
    /// What a plan says of a shard after this change, which makes an epoch.
    pub fn served(&self, epoch: u32) -> Option<ServedShard> {
        let Change::Served { shard, process, addresses, copy } = self.clone() else { return None };
        Some(ServedShard { shard, process, addresses, copy, since: epoch })
    }
}

impl Plan {
    /// The epoch that a job begins in.
    pub const FIRST_EPOCH: u32 = 1;

    /// The tables that are packs, with the names of their layers.
    pub fn packs(&self) -> Vec<PackNames> {
        let names = |table: &TableSpec| PackNames {
            table: table.name.clone(),
            layers: table.layers.iter().map(|layer| layer.name.clone()).collect(),
        };
        self.tables.iter().filter(|table| table.is_pack()).map(names).collect()
    }

    /// Makes the change of an epoch. A change that does not fit (a worker joins that is there, or one leaves that is not) leaves
    /// only the epoch's number behind.
    pub fn apply(&mut self, epoch: u32, change: &Change) {
        self.epoch = epoch;
        match change {
            Change::Joining { worker, incarnation } => {
                let standing = Standing::Joining;
                let member = Member { worker: *worker, incarnation: *incarnation, standing, since: epoch };
                match self.members.binary_search_by_key(worker, |member| member.worker) {
                    Ok(at) if self.members[at].is_live() => {}
                    Ok(at) => self.members[at] = member,
                    Err(at) => self.members.insert(at, member),
                }
            }
            Change::Joined { worker, clock } => self.move_on(epoch, *worker, Standing::From(*clock)),
            Change::Left { worker } => self.move_on(epoch, *worker, Standing::Left),
            Change::Policy(rule) => {
                self.switches.retain(|known| !known.rule.is_replaced_by(rule));
                self.switches.push(Switch { epoch, rule: rule.clone() });
            }
            Change::Served { shard, .. } => {
                if let Ok(at) = self.shards.binary_search_by_key(shard, |served| served.shard)
                    && let Some(served) = change.served(epoch)
                {
                    self.shards[at] = served;
                }
            }
        }
    }

    fn move_on(&mut self, epoch: u32, worker: WorkerId, standing: Standing) {
        let Ok(at) = self.members.binary_search_by_key(&worker, |member| member.worker) else { return };
        let member = &mut self.members[at];
        let follows = match standing {
            Standing::From(_) => member.standing == Standing::Joining,
            Standing::Left => member.is_live(),
            Standing::Joining => false,
        };
        if follows {
            member.standing = standing;
            member.since = epoch;
        }
    }

    /// The changes, each with its epoch, that lead from this plan to a later one of the same job. Changes that a later one undid
    /// are left out; of an incarnation that came and went in between only the last words are told.
    pub fn changes_to(&self, newer: &Plan) -> Vec<(u32, Change)> {
        let mut changes = Vec::new();
        for member in newer.members.iter().filter(|member| member.since > self.epoch) {
            let Member { worker, incarnation, standing, since } = *member;
            let mut add = |change| changes.push((since, change));
            let known = self.member(worker);
            let is_known = known.is_some_and(|known| known.is_live() && known.incarnation == incarnation);
            if !is_known {
                if known.is_some_and(Member::is_live) {
                    add(Change::Left { worker });
                }
                add(Change::Joining { worker, incarnation });
            }
            match standing {
                Standing::Joining => {}
                Standing::From(clock) => add(Change::Joined { worker, clock }),
                Standing::Left => add(Change::Left { worker }),
            }
        }
        let switches = newer.switches.iter().filter(|switch| switch.epoch > self.epoch);
        changes.extend(switches.map(|switch| (switch.epoch, Change::Policy(switch.rule.clone()))));
        let moved = newer.shards.iter().filter(|served| served.since > self.epoch);
        changes.extend(moved.map(|served| (served.since, served.change())));
        changes.sort_by_key(|(epoch, _)| *epoch);
        changes
    }

    /// The plan as a worker is told of it: without the other members. A reader, which is none, is told of the first.
    pub fn for_worker(&self, worker: WorkerId) -> Plan {
        let Plan {
            epoch,
            tables,
            parts,
            whole,
            shards,
            workers,
            members: _,
            policy,
            overrides,
            switches,
            seed,
            resumed,
        } = self;
        Plan {
            epoch: *epoch,
            tables: tables.clone(),
            parts: parts.clone(),
            whole: whole.clone(),
            shards: shards.clone(),
            workers: *workers,
            // The others are not copied: there may be thousands, and everybody is told.
            members: match worker.is_reader() {
                true => self.members.first().copied().into_iter().collect(),
                false => self.member(worker).copied().into_iter().collect(),
            },
            policy: policy.clone(),
            overrides: overrides.clone(),
            switches: switches.clone(),
            seed: *seed,
            resumed: resumed.as_ref().map(|resumed| Resumed {
                folder: resumed.folder.clone(),
                clock: resumed.clock,
                files: Vec::new(),
                workers: resumed.workers,
                // What one that joins later would take over may be with others by then.
                worker_files: match self.member(worker) {
                    Some(member) if self.is_original(member) => resumed.worker_files.clone(),
                    _ => Vec::new(),
                },
            }),
        }
    }

    /// The clock that the job begins with: 0, or that of the checkpoint it goes on from.
    pub fn first_clock(&self) -> Clock {
        self.resumed.as_ref().map_or(0, |resumed| resumed.clock)
    }

    /// Whether a member is one that the job began with.
    pub fn is_original(&self, member: &Member) -> bool {
        member.standing == Standing::From(self.first_clock())
    }

    /// The latest incarnation of a rank.
    pub fn member(&self, worker: WorkerId) -> Option<&Member> {
        let at = self.members.binary_search_by_key(&worker, |member| member.worker).ok()?;
        Some(&self.members[at])
    }

    /// A shard, with the process that serves it.
    pub fn served(&self, shard: ShardId) -> Option<&ServedShard> {
        let at = self.shards.binary_search_by_key(&shard, |served| served.shard).ok()?;
        Some(&self.shards[at])
    }

    /// The members that take part, or are about to.
    pub fn live_members(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.is_live())
    }

    /// The first epoch with the table's current codecs; frames of earlier epochs cannot be decoded, and are refused. Changes of
    /// the members do not matter here.
    pub fn valid_from(&self, table: TableId) -> u32 {
        let table = &self.tables[table.0 as usize];
        // Codecs are the same on all servers of a table.
        let is_about =
            |switch: &&Switch| switch.rule.changes_frames() && table.is_meant_by(&switch.rule, ServerId(0));
        self.switches.iter().rev().find(is_about).map_or(Plan::FIRST_EPOCH, |switch| switch.epoch)
    }

    /// Data cores of each server, by number. The plan must have passed [`Plan::check`].
    pub fn cores(&self) -> Vec<u32> {
        let mut cores = Vec::new();
        for ServedShard { shard, .. } in &self.shards {
            cores.resize(shard.server.0 as usize + 1, 0);
            cores[shard.server.0 as usize] += 1;
        }
        cores
    }

    /// The chunks of every table, each with its shard. The plan must have passed [`Plan::check`].
    pub fn chunks(&self) -> Vec<Vec<Chunk>> {
        chunks(&self.tables, &self.parts, &self.whole, &self.cores(), &self.policy)
    }

    /// The policy of a table on a server: the job's, then the table's own, then the job's exceptions, then switches.
    pub fn policy_of(&self, table: TableId, server: ServerId) -> Policy {
        let rules = self.overrides.iter().chain(self.switches.iter().map(|switch| &switch.rule));
        self.tables[table.0 as usize].policy_on(server, &self.policy, rules)
    }

    /// Whether the plan's numbers fit each other and the limits, so that no role indexes out of range, or takes memory
    /// without bound, on a peer's word. The error says what does not fit.
    pub fn check(&self) -> Result<(), String> {
        self.check_shards()?;
        self.check_workers()?;
        self.resumed.as_ref().map_or(Ok(()), Resumed::check)?;
        // Clocks are counted on from it.
        if self.first_clock() > limits::MAX_FIRST_CLOCK {
            return Err(format!("it begins with clock {}", self.first_clock()));
        }
        self.check_tables()
    }

    /// Servers and their cores are numbered from 0 without a gap, and stand in order.
    fn check_shards(&self) -> Result<(), String> {
        let mut next = [ShardId { server: ServerId(0), core: 0 }; 2];
        for ServedShard { shard, addresses, .. } in &self.shards {
            let within = shard.server.0 < limits::MAX_SERVERS && shard.core < limits::MAX_CORES;
            if !within || !next.contains(shard) {
                return Err(format!("{shard} is out of order"));
            }
            addresses.check().map_err(|why| format!("{shard} has {why}"))?;
            let ShardId { server, core } = *shard;
            next = [ShardId { server, core: core + 1 }, ShardId { server: ServerId(server.0 + 1), core: 0 }];
        }
        if self.shards.is_empty() { Err("there is no server".into()) } else { Ok(()) }
    }

    fn check_workers(&self) -> Result<(), String> {
        let ascending = self.members.windows(2).all(|pair| pair[0].worker < pair[1].worker);
        match self.members.last() {
            Some(last) if ascending && last.worker.0 < limits::MAX_WORKERS => Ok(()),
            _ => Err("the ranks of its workers are missing, out of order or out of range".into()),
        }
    }

    /// Whether a change can be made to this plan without a peer's word taking memory without bound.
    pub fn check_change(&self, change: &Change) -> Result<(), String> {
        match change {
            Change::Joining { worker, .. } if worker.0 >= limits::MAX_WORKERS => {
                Err(format!("{worker} is out of range: there may be {}", limits::MAX_WORKERS))
            }
            Change::Policy(rule) => {
                let kept = self.switches.iter().filter(|known| !known.rule.is_replaced_by(rule)).count();
                if kept >= limits::MAX_OVERRIDES {
                    return Err(format!("there are {kept} switches of policies already"));
                }
                rule.check().map_err(|error| error.to_string())
            }
            Change::Served { shard, addresses, .. } => {
                if self.served(*shard).is_none() {
                    return Err(format!("{shard} does not exist"));
                }
                addresses.check().map_err(|why| format!("{shard} has {why}"))
            }
            Change::Joining { .. } | Change::Joined { .. } | Change::Left { .. } => Ok(()),
        }
    }

    fn check_tables(&self) -> Result<(), String> {
        if self.tables.is_empty() || self.tables.len() != self.parts.len() {
            return Err(format!("{} tables, and parts of {}", self.tables.len(), self.parts.len()));
        }
        let servers = self.shards.last().map_or(0, |last| last.shard.server.0 + 1);
        if let Some(name) = repeated_name(&self.tables) {
            return Err(format!("two tables are called `{name}`"));
        }
        let mut chunks = 0;
        for (spec, parts) in self.tables.iter().zip(&self.parts) {
            spec.check()?;
            check_parts(spec, parts, servers)?;
            chunks += chunks_at_most(spec, parts, &self.policy);
        }
        let is_whole =
            |table: &TableId| self.parts.get(table.0 as usize).is_some_and(|parts| parts.len() == 1);
        if !self.whole.is_sorted_by(|one, next| one < next) || !self.whole.iter().all(is_whole) {
            return Err("tables that are not to be cut are out of order, or cut".into());
        }
        if chunks > limits::MAX_CHUNKS {
            return Err(format!(
                "its tables make {chunks} chunks; there may be {}: make chunks larger",
                limits::MAX_CHUNKS
            ));
        }
        Ok(())
    }
}

/// Parts cover their table without gap or overlap, by whole rows, on servers that exist.
fn check_parts(spec: &TableSpec, parts: &[Part], servers: u32) -> Result<(), String> {
    let mut next = 0u64;
    for part in parts {
        let fits = part.start == next
            && part.len > 0
            && part.len.is_multiple_of(spec.row_elements())
            && part.server.0 < servers;
        if !fits {
            return Err(format!("table `{}` has a part that does not fit: {part:?}", spec.name));
        }
        next = next.saturating_add(part.len);
    }
    if next == spec.elements() {
        return Ok(());
    }
    Err(format!("the parts of table `{}` have {next} elements, it has {}", spec.name, spec.elements()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Axis, Policies};
    use proptest::prelude::*;

    fn part(server: u32, start: u64, len: u64) -> Part {
        Part { server: ServerId(server), start, len }
    }

    fn shard(server: u32, core: u32) -> ServedShard {
        let process = ProcessId(u64::from(server) + 100);
        ServedShard::original(ShardId { server: ServerId(server), core }, process, "host:1".into())
    }

    fn plan() -> Plan {
        Plan {
            epoch: 1,
            tables: vec![TableSpec::dense("w", [10]), TableSpec::sparse("rows", 4, 3)],
            parts: vec![vec![part(0, 0, 6), part(1, 6, 4)], vec![part(1, 0, 12)]],
            whole: vec![TableId(1)],
            shards: vec![shard(0, 0), shard(0, 1), shard(1, 0)],
            workers: 2,
            members: vec![Member::original(WorkerId(0), 1), Member::original(WorkerId(1), 2)],
            policy: Policy::default().with(Axis::Chunk, "16B"),
            overrides: vec![],
            switches: vec![],
            seed: 0,
            resumed: None,
        }
    }

    #[test]
    fn a_plan_that_fits_is_taken() {
        assert_eq!(plan().check(), Ok(()));
        assert_eq!(plan().cores(), [2, 1]);
        assert_eq!(plan().served(shard(0, 1).shard), Some(&shard(0, 1)));
        assert_eq!(plan().served(shard(1, 1).shard), None);
    }

    fn resumed(clock: Clock) -> Resumed {
        Resumed { folder: "f".into(), clock, files: vec![], workers: 1, worker_files: vec![] }
    }

    #[test]
    fn a_plan_that_does_not_fit_itself_or_the_limits_is_refused() {
        type Spoil = fn(&mut Plan);
        let cases: [(&str, Spoil); 26] = [
            ("there is no server", |plan| plan.shards.clear()),
            ("server 4294967295 core 0 is out of order", |plan| plan.shards.push(shard(u32::MAX, 0))),
            ("out of order", |plan| plan.shards.push(shard(1, 0))),
            ("out of order", |plan| plan.shards.push(shard(3, 0))),
            ("out of order", |plan| plan.shards.swap(0, 1)),
            ("out of order", |plan| {
                plan.shards.extend((1..=limits::MAX_CORES).map(|core| shard(1, core)));
            }),
            ("server 0 core 1 has 9 addresses", |plan| {
                plan.shards[1].addresses = (0..9).map(|n| format!("host:{n}")).collect();
            }),
            ("ranks", |plan| plan.members.clear()),
            ("is no name of a checkpoint's file", |plan| {
                plan.resumed = Some(Resumed { folder: "../other".into(), ..resumed(1) });
            }),
            ("begins with clock", |plan| {
                plan.resumed = Some(resumed(u64::MAX));
            }),
            ("ranks", |plan| plan.members.swap(0, 1)),
            ("ranks", |plan| plan.members.push(Member::original(WorkerId(u32::MAX), 0))),
            ("2 tables, and parts of 1", |plan| plan.parts.truncate(1)),
            ("expected 1 to", |plan| plan.tables[0].shape = vec![u64::MAX, u64::MAX]),
            ("two tables are called `w`", |plan| plan.tables[1].name = "w".into()),
            ("does not fit", |plan| plan.parts[0][0].len = 7),
            ("does not fit", |plan| plan.parts[0][1].server = ServerId(2)),
            ("does not fit", |plan| plan.parts[0].insert(1, part(0, 6, 0))),
            ("does not fit", |plan| plan.parts[0].swap(0, 1)),
            ("have 18446744073709551615 elements, it has 10", |plan| plan.parts[0][1].len = u64::MAX),
            ("have 0 elements, it has 12", |plan| plan.parts[1].clear()),
            // A row over two servers.
            ("does not fit", |plan| plan.parts[1] = vec![part(0, 0, 7), part(1, 7, 5)]),
            ("not to be cut", |plan| plan.whole = vec![TableId(0)]),
            ("not to be cut", |plan| plan.whole = vec![TableId(1), TableId(1)]),
            ("not to be cut", |plan| plan.whole = vec![TableId(2)]),
            ("make chunks larger", |plan| {
                plan.tables[0].shape = vec![limits::MAX_TABLE_ELEMENTS];
                plan.parts[0] = vec![part(0, 0, limits::MAX_TABLE_ELEMENTS)];
            }),
        ];
        for (expected, spoil) in cases {
            let mut plan = plan();
            spoil(&mut plan);
            let why = plan.check().unwrap_err();
            assert!(why.contains(expected), "{why}");
        }
    }

    fn change() -> impl Strategy<Value = Change> {
        let worker = || (0u32..4).prop_map(WorkerId);
        let rule = (0usize..3, any::<bool>(), 0usize..4).prop_map(|(table, server, axis)| {
            let axes: &[Axis] =
                [&[Axis::Sync][..], &[Axis::Optimizer], &[Axis::Codec], &[Axis::Sync, Axis::Codec]][axis];
            let on_one = server && !axes.contains(&Axis::Codec);
            let policies = Policies::of(axes.iter().map(|axis| (*axis, "text")));
            PolicyOverride::new(["*", "w", "rows"][table], policies).on(on_one.then_some(ServerId(1)))
        });
        prop_oneof![
            (worker(), 10u64..14).prop_map(|(worker, incarnation)| Change::Joining { worker, incarnation }),
            (worker(), 1u64..9).prop_map(|(worker, clock)| Change::Joined { worker, clock }),
            worker().prop_map(|worker| Change::Left { worker }),
            rule.prop_map(Change::Policy),
            (0u32..2, 1u64..4, proptest::option::of(1u64..4)).prop_map(|(server, process, copy)| {
                Change::Served {
                    shard: ShardId { server: ServerId(server), core: 0 },
                    process: ProcessId(process),
                    addresses: "host:2".into(),
                    copy: copy.map(|process| CopyId { process: ProcessId(process), order: process }),
                }
            }),
        ]
    }

    /// A change that a coordinator would make to this plan. Incarnations are never used twice.
    fn fits(plan: &Plan, change: &Change) -> bool {
        let standing = |worker: &WorkerId| plan.member(*worker).map(|member| member.standing);
        match change {
            Change::Joining { worker, .. } => !plan.member(*worker).is_some_and(Member::is_live),
            Change::Joined { worker, .. } => standing(worker) == Some(Standing::Joining),
            Change::Left { worker } => plan.member(*worker).is_some_and(Member::is_live),
            Change::Policy(_) => true,
            Change::Served { shard, .. } => plan.served(*shard).is_some(),
        }
    }

    proptest! {
        #[test]
        fn the_changes_from_one_epoch_to_another_lead_there(
            changes in proptest::collection::vec(change(), 0..40),
            from in 0usize..40,
        ) {
            let mut epochs = vec![plan()];
            for mut change in changes {
                let mut next = epochs[epochs.len() - 1].clone();
                let epoch = next.epoch + 1;
                if let Change::Joining { incarnation, .. } = &mut change {
                    *incarnation = 100 + u64::from(epoch);
                }
                if fits(&next, &change) {
                    next.apply(epoch, &change);
                    prop_assert_eq!(next.check(), Ok(()));
                    epochs.push(next);
                }
            }
            let newest = &epochs[epochs.len() - 1];
            let mut plan = epochs[from % epochs.len()].clone();
            for (epoch, change) in plan.changes_to(newest) {
                prop_assert!(fits(&plan, &change), "{:?}", change);
                plan.apply(epoch, &change);
            }
            prop_assert_eq!(&plan, newest);
            prop_assert_eq!(newest.changes_to(&plan), vec![]);
        }
    }

    #[test]
    fn a_change_that_does_not_fit_changes_nothing_but_the_epoch() {
        let mut plan = plan();
        let before = plan.clone();
        let worker = WorkerId(1);
        for (epoch, change) in [
            (2, Change::Joining { worker, incarnation: 9 }),
            (3, Change::Joined { worker, clock: 4 }),
            (4, Change::Left { worker: WorkerId(7) }),
        ] {
            plan.apply(epoch, &change);
            assert_eq!(plan, Plan { epoch, ..before.clone() });
        }
    }

    #[test]
    fn frames_of_a_table_are_stale_when_its_codec_has_changed_since() {
        let mut plan = plan();
        let rule = |table: &str, axis, text: &str| {
            Change::Policy(PolicyOverride::new(table, Policies::of([(axis, text)])))
        };
        plan.apply(2, &rule("*", Axis::Sync, "f16"));
        plan.apply(3, &rule("w", Axis::Codec, "f16"));
        plan.apply(4, &Change::Left { worker: WorkerId(0) });
        assert_eq!([0, 1].map(|table| plan.valid_from(TableId(table))), [3, 1]);
        plan.apply(5, &rule("*", Axis::AnswerCodec, "f16"));
        assert_eq!([0, 1].map(|table| plan.valid_from(TableId(table))), [5, 5]);
    }

    #[test]
    fn a_switch_takes_the_place_of_an_earlier_one_that_says_nothing_else() {
        let mut plan = plan();
        let rule = |table: &str, axis, text: &str| {
            Change::Policy(PolicyOverride::new(table, Policies::of([(axis, text)])))
        };
        plan.apply(2, &rule("*", Axis::Sync, "asp"));
        plan.apply(3, &rule("*", Axis::Optimizer, "sgd"));
        plan.apply(4, &rule("*", Axis::Sync, "bsp"));
        plan.apply(5, &rule("w", Axis::Sync, "asp"));
        let epochs: Vec<u32> = plan.switches.iter().map(|switch| switch.epoch).collect();
        assert_eq!(epochs, [3, 4, 5]);
        let sync = |table| plan.policy_of(TableId(table), ServerId(0)).get(Axis::Sync).to_owned();
        assert_eq!([0, 1].map(sync), ["asp", "bsp"]);
    }
}
