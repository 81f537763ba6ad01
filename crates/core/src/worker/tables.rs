//! The tables of a worker, by number.

use super::WorkerError;
use super::answers::Decoders;
use super::encoding::{Sender, TableCodecs};
use super::holder::HoldCounts;
use super::local_table::LocalTable;
use super::session::Access;
use crate::checkpoint::WorkerArray;
use crate::consistency::SyncPolicy;
use crate::hold::Hold;
use crate::policy::{NonFinite, Policy, PolicyOverride};
use crate::registry::Registry;
use crate::status::UpdatesReport;
use crate::store::Allocate;
use crate::table::{Chunk, Pack, TableSpec};
use crate::types::{Clock, ServerId, ShardId, TableId};
use crate::wire::Plan;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Index, IndexMut};
use std::sync::Arc;

/// All tables that the application has declared, in its order.
#[derive(Debug, Default)]
pub(super) struct Tables {
    tables: Vec<LocalTable>,
    decoders: Decoders,
}

/// A table's entry in a plan.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) chunks: Vec<Chunk>,
    pub(super) policies: TablePolicies,
}

/// Policies of a table from an epoch on.
#[derive(Debug)]
pub(super) struct TablePolicies {
    pub(super) nonfinite: NonFinite,
    /// Its frames overtake those of tables that were created later.
    pub(super) is_prioritized: bool,
    pub(super) sync: SyncPolicy,
    /// The same for servers that have rules of their own.
    pub(super) sync_apart: BTreeMap<ServerId, SyncPolicy>,
    pub(super) is_broadcast: bool,
    /// Which updates are held back, if some are.
    pub(super) hold: Option<Hold>,
    /// [`Plan::valid_from`](crate::wire::Plan::valid_from) of the table.
    pub(super) valid_from: u32,
    /// Its codecs, if that epoch is another one than before.
    pub(super) codecs: Option<TableCodecs>,
}

impl Tables {
    /// Whether every table's model has workers leave out iterations whose rounds closed without them.
    pub(super) fn catch_up(&self) -> bool {
        self.iter().all(LocalTable::catches_up)
    }

    /// Indices of the tables that hold updates back; with `all` also of those that may.
    pub(super) fn holding(&self, all: bool) -> Vec<usize> {
        let holds =
            |local: &LocalTable| if all { local.held().may_hold() } else { local.held().holds_back() };
        let tables = self.tables.iter().enumerate().filter(|(_, local)| !local.is_submitting());
        tables.filter(|(_, local)| holds(local)).map(|(table, _)| table).collect()
    }

    /// What became of updates, where the policy `hold` is used or was.
    pub(super) fn updates(&self) -> Option<UpdatesReport> {
        let counts = self.iter().map(|table| table.held().counts());
        let HoldCounts { sent, held, longest } = counts.fold(HoldCounts::default(), HoldCounts::beside);
        (sent + held > 0).then_some(UpdatesReport { sent, held, longest })
    }

    /// A sentence about the update that has been held back for longest.
    pub(super) fn explain_hold(&self) -> Option<String> {
        let oldest = self.iter().filter_map(|table| table.held().explain(table.name())).max();
        oldest.map(|(_, sentence)| sentence)
    }

    /// Whether something is kept that servers do not have, or may be.
    pub(super) fn keep_back(&mut self) -> bool {
        self.iter_mut().any(|table| table.keeping().is_some())
    }

    /// Whether a gradient of some table is being submitted.
    pub(super) fn are_submitting(&self) -> bool {
        self.iter().any(LocalTable::is_submitting)
    }

    /// Copies of what is kept, for a checkpoint that is made in an iteration, while nothing is submitted.
    pub(super) fn kept_back(&mut self, clock: Clock) -> Result<Vec<WorkerArray>, String> {
        let mut arrays = Vec::new();
        for table in &mut self.tables {
            arrays.extend(table.keeping().copies(clock)?);
        }
        Ok(arrays)
    }

    /// Keeps what a worker kept when it was saved, this one or another. The error says what does not fit.
    pub(super) fn keep_again(&mut self, array: WorkerArray, is_own: bool) -> Result<(), String> {
        match self.tables.iter_mut().find(|table| table.name() == array.table) {
            Some(table) => table.keeping().keep_again(array, is_own),
            None => Err(format!("there is no table `{}`", array.table)),
        }
    }

    /// Whether an answer of some table comes while the application computes: its copy is a cache.
    pub(super) fn have_copies(&self) -> bool {
        self.iter().any(|table| table.cache_bound().is_some())
    }

    /// Whether a gradient of this clock was pushed, and not refused since.
    pub(super) fn have_pushed(&self, clock: Clock) -> bool {
        self.iter().any(|table| table.has_pushed(clock))
    }

    /// Whether rounds before this one may be open on some shard, as far as is known.
    pub(super) fn may_lack(&self, version: Clock) -> bool {
        self.iter().any(|table| table.may_lack(version))
    }

    /// The shards that have a part of some table.
    pub(super) fn shards(&self) -> BTreeSet<ShardId> {
        self.tables.iter().flat_map(|local| local.layout().shards()).collect()
    }

    /// Adds a table with its initial values.
    pub(super) fn declare(&mut self, mut spec: TableSpec, initial: Vec<f32>) -> Result<TableId, WorkerError> {
        spec.check().map_err(WorkerError::Table)?;
        if self.tables.iter().any(|table| table.name() == spec.name) {
            return Err(WorkerError::Table(format!("table `{}` is created twice", spec.name)));
        }
        if initial.len() as u64 != spec.elements() {
            return Err(WorkerError::Shape {
                table: spec.name.clone(),
                expected: format!("{} initial values for shape {:?}", spec.elements(), spec.shape),
                found: initial.len().to_string(),
            });
        }
        // A matter of who divides tables into packs: the job does not hear of it.
        spec.alone = false;
        self.tables.push(LocalTable::new(spec, initial));
        Ok(TableId(self.tables.len() as u32 - 1))
    }

    /// Puts the tables into packs, whose tensors are these tables in their order.
    pub(super) fn pack(&mut self, packs: &[Pack]) -> Result<(), WorkerError> {
        let mut numbers: Vec<usize> = packs.iter().flat_map(Pack::tensors).map(|it| it.number).collect();
        numbers.sort_unstable();
        let fits = |pack: &Pack| {
            pack.tensors().iter().all(|tensor| {
                self.tables
                    .get(tensor.number)
                    .is_some_and(|local| local.layout().elements() == tensor.place.len())
            })
        };
        if !numbers.into_iter().eq(0..self.tables.len()) || !packs.iter().all(fits) {
            return Err(WorkerError::Table("the packs are not of the tables that were created".into()));
        }
        packs.iter().try_for_each(|pack| pack.spec().check()).map_err(WorkerError::Table)?;
        let mut single: Vec<Option<LocalTable>> =
            std::mem::take(&mut self.tables).into_iter().map(Some).collect();
        for pack in packs {
            let mut tensors =
                pack.tensors().iter().filter_map(|tensor| single[tensor.number].take()).collect::<Vec<_>>();
            self.tables.push(match tensors.len() {
                1 => tensors.remove(0),
                _ => {
                    let initial = tensors.iter_mut().flat_map(LocalTable::take_initial).collect();
                    LocalTable::new(pack.spec().clone(), initial)
                }
            });
        }
        Ok(())
    }

    /// Takes the tables of a plan, for a reader, which declares none.
    pub(super) fn take_specs(&mut self, plan: &Plan) {
        self.tables = plan.tables.iter().map(|spec| LocalTable::new(spec.clone(), Vec::new())).collect();
    }

    /// Lays out all tables by the plan, if the plan is about them. Returns whether all of them overlap pushes and pulls.
    pub(super) fn plan(
        &mut self,
        plan: &Plan,
        registry: &Registry,
        worker: u32,
        access: Access,
        allocator: &Arc<dyn Allocate>,
    ) -> Result<bool, WorkerError> {
        let same = plan.tables.iter().eq(self.specs());
        let checked = if same { plan.check() } else { Err("it is about other tables".into()) };
        checked.map_err(|why| {
            WorkerError::Table(format!("the coordinator's plan does not fit this worker: {why}"))
        })?;
        let mut overlap = true;
        for (table, (local, chunks)) in (0..).map(TableId).zip(self.tables.iter_mut().zip(plan.chunks())) {
            let servers: BTreeSet<ServerId> = chunks.iter().map(|chunk| chunk.shard.server).collect();
            let policies = policies_of(plan, registry, worker, (table, local), &servers)?;
            overlap &= policies.sync.overlap;
            local.plan(Planned { chunks, policies }, access, allocator, &mut self.decoders);
        }
        Ok(overlap)
    }

    /// Exchanges of all tables wait for their answers from now on, whatever the consistency model.
    pub(super) fn wait_for_exchanges(&mut self) {
        self.tables.iter_mut().for_each(LocalTable::wait_for_exchanges);
    }

    /// Indices of the tables whose [`Plan::valid_from`] this plan changes.
    pub(super) fn changed_frames(&self, plan: &Plan) -> Vec<usize> {
        let is_changed =
            |&index: &usize| self.tables[index].valid_from() != plan.valid_from(TableId(index as u32));
        (0..self.tables.len()).filter(is_changed).collect()
    }

    /// Lets the plan's policies hold for the tables that a rule is about.
    pub(super) fn follow(
        &mut self,
        plan: &Plan,
        registry: &Registry,
        worker: u32,
        rule: &PolicyOverride,
    ) -> Result<(), WorkerError> {
        for (table, local) in (0..).map(TableId).zip(&mut self.tables) {
            let spec = local.layout().spec();
            if !spec.is_meant_by(rule, rule.server.unwrap_or(ServerId(0))) {
                continue;
            }
            let servers: BTreeSet<ServerId> = local.layout().shards().map(|shard| shard.server).collect();
            let policies = policies_of(plan, registry, worker, (table, local), &servers)?;
            local.follow(policies, &mut self.decoders);
        }
        self.decoders.tidy();
        Ok(())
    }

    pub(super) fn get(&self, table: TableId) -> Option<&LocalTable> {
        self.tables.get(table.0 as usize)
    }

    /// The table of this number, if there is one.
    pub(super) fn find(&self, table: TableId) -> Result<&LocalTable, WorkerError> {
        self.index(table).map(|index| &self.tables[index])
    }

    /// A table's place, if there is such a table.
    pub(super) fn index(&self, table: TableId) -> Result<usize, WorkerError> {
        let index = table.0 as usize;
        if index < self.tables.len() {
            return Ok(index);
        }
        Err(WorkerError::Table(format!("table {index} does not exist; there are {}", self.tables.len())))
    }

    /// The last version that is here of everything that is broadcast.
    pub(super) fn broadcast_version(&self) -> Option<Clock> {
        let of_table = |local: &LocalTable| {
            let replica = local.replica()?;
            (0..local.layout().shard_count()).map(|stream| replica.version(stream)).min()
        };
        self.tables.iter().filter_map(of_table).min().flatten()
    }

    pub(super) fn len(&self) -> usize {
        self.tables.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &LocalTable> {
        self.tables.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut LocalTable> {
        self.tables.iter_mut()
    }

    pub(super) fn specs(&self) -> impl Iterator<Item = &TableSpec> {
        self.tables.iter().map(|table| table.layout().spec())
    }
}

/// A table's policies in a plan: those on its first server, and the consistency models of others that have rules of their own.
fn policies_of(
    plan: &Plan,
    registry: &Registry,
    worker: u32,
    (table, local): (TableId, &LocalTable),
    servers: &BTreeSet<ServerId>,
) -> Result<TablePolicies, WorkerError> {
    let fault = |why: String| WorkerError::Table(format!("this worker: {why}"));
    let sync_of = |policy: &Policy| policy.sync(registry).map_err(|error| fault(error.to_string()));
    let first = servers.first().copied().unwrap_or(ServerId(0));
    let policy = plan.policy_of(table, first);
    let sync = sync_of(&policy)?;
    let mut rules = plan.overrides.iter().chain(plan.switches.iter().map(|switch| &switch.rule));
    let is_apart = rules.any(|rule| rule.server.is_some());
    let mut sync_apart = BTreeMap::new();
    for &server in servers.iter().filter(|_| is_apart) {
        let own = sync_of(&plan.policy_of(table, server))?;
        if own.to_string() != sync.to_string() {
            sync_apart.insert(server, own);
        }
    }
    let valid_from = plan.valid_from(table);
    let sender = Sender { seed: plan.seed, worker, table: table.0 };
    let codecs = (valid_from != local.valid_from())
        .then(|| TableCodecs::new(registry, local.layout().spec(), &policy, sender).map_err(fault))
        .transpose()?;
    Ok(TablePolicies {
        nonfinite: policy.nonfinite(),
        is_prioritized: policy.is_prioritized(),
        sync,
        sync_apart,
        is_broadcast: policy.is_broadcast(),
        hold: policy.hold(registry).map_err(|error| fault(error.to_string()))?,
        valid_from,
        codecs,
    })
}

impl Index<usize> for Tables {
    type Output = LocalTable;

    fn index(&self, index: usize) -> &LocalTable {
        &self.tables[index]
    }
}

impl IndexMut<usize> for Tables {
    fn index_mut(&mut self, index: usize) -> &mut LocalTable {
        &mut self.tables[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(names: [&str; 4]) -> Tables {
        let mut tables = Tables::default();
        for (at, name) in names.into_iter().enumerate() {
            let spec = TableSpec::dense(name, [at as u64 + 1]).alone();
            tables.declare(spec, vec![at as f32; at + 1]).unwrap();
        }
        tables
    }

    #[test]
    fn packed_tables_have_the_initial_values_of_their_tensors() {
        let mut tables = declared(["a", "b", "c", "d"]);
        let specs: Vec<TableSpec> = tables.specs().cloned().collect();
        let packs = Pack::divide(specs.clone(), 10, |one, other| (one.name == "b") == (other.name == "b"));
        tables.pack(&packs).unwrap();
        assert!(tables.specs().eq(packs.iter().map(Pack::spec)));
        assert_eq!((tables[0].name(), tables[1].name()), ("a and 2 more", "b"));
        assert_eq!(tables[0].take_initial(), [0.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0]);
        assert_eq!(tables[1].take_initial(), [1.0, 1.0]);

        // Packs of other tables.
        for tensors in
            [&specs[..3], &[specs[1].clone(), specs[0].clone(), specs[2].clone(), specs[3].clone()]]
        {
            let mut tables = declared(["a", "b", "c", "d"]);
            let packs = Pack::divide(tensors.to_vec(), 10, |_, _| true);
            assert!(tables.pack(&packs).is_err());
            assert_eq!(tables.len(), 4);
        }
    }
}
