//! No acknowledged push is lost, and none is applied twice.
//!
//! Workers push tags ([`crate::gradient::tag`]), so that parameters say how many pushes of each worker they hold and
//! which. What was pushed and acknowledged is counted on the wire, for each process that had a rank: one that is started anew
//! begins at a later clock, and may push a clock that the one before it had pushed. After its last iteration a worker pushes what it
//! has held back.

use super::Checker;
use super::layout::Layout;
use super::policies::Model;
use crate::actor::Actor;
use crate::cluster::Cluster;
use crate::gradient::{tag, touched_rows};
use crate::rule::FrameView;
use crate::scenario::ScenarioError;
use paramill_core::policy::Axis;
use paramill_core::types::{Clock, NodeId, ShardId, TableId, WorkerId};
use paramill_core::wire::{Flags, Kind, ack};
use std::collections::{BTreeMap, BTreeSet};

/// Counts pushes on the wire and in the parameters.
#[derive(Debug)]
pub struct ExactlyOnce {
    layout: Layout,
    workers: u32,
    iterations: Clock,
    seed: u64,
    /// Whether gradients may be left out for coming late.
    may_drop: bool,
    /// What each process of a worker pushed, the last one last.
    issued: BTreeMap<(WorkerId, TableId), Vec<Pushes>>,
    /// Which push a request of a worker's process is.
    requests: BTreeMap<(WorkerId, u64, u64), (TableId, Clock)>,
    /// Up to which clock the pushes of a worker's process are acknowledged.
    acknowledged: BTreeMap<(WorkerId, u64, TableId, ShardId), Clock>,
    /// Workers that may die: what became of their last pushes is not known.
    mortal: BTreeSet<WorkerId>,
}

/// The pushes of one process.
#[derive(Debug, Clone, Copy)]
struct Pushes {
    life: u64,
    first: Clock,
    /// The clock after the last.
    end: Clock,
}

impl ExactlyOnce {
    /// For a job whose workers push tags under `sgd:lr=1` and a sum over workers.
    pub fn new(cluster: &Cluster, mortal: &BTreeSet<WorkerId>) -> Result<ExactlyOnce, ScenarioError> {
        let scenario = cluster.scenario();
        let rules = scenario.switches.iter().map(|switch| &switch.change).chain(&scenario.overrides);
        let exceptions = rules.filter_map(|rule| rule.policies.get(Axis::Sync));
        let models = exceptions.chain([scenario.policy.get(Axis::Sync)]).map(Model::of);
        let models = models.collect::<Result<Vec<Model>, _>>()?;
        let has = |is_it: fn(&Model) -> bool| models.iter().any(is_it);
        // Rounds that a condition closed early are over for a model of rounds that follows.
        let passes_rounds = has(|model| model.closes_early) && has(|model| model.sync.starts_with("bsp"));
        Ok(ExactlyOnce {
            layout: Layout::new(scenario)?,
            workers: cluster.worker_ids().count() as u32,
            iterations: scenario.iterations,
            seed: scenario.seed,
            may_drop: has(|model| model.drops) || passes_rounds,
            issued: BTreeMap::new(),
            requests: BTreeMap::new(),
            acknowledged: BTreeMap::new(),
            mortal: mortal.clone(),
        })
    }

    /// All processes of a worker that pushed a table.
    fn issued(&self, worker: WorkerId, table: TableId) -> &[Pushes] {
        self.issued.get(&(worker, table)).map_or(&[], Vec::as_slice)
    }

    /// What is certain of the last process of a worker: its pushes that a shard acknowledged.
    fn acknowledged(&self, worker: WorkerId, table: TableId, shard: ShardId) -> Option<Pushes> {
        let Pushes { life, first, .. } = *self.issued(worker, table).last()?;
        let end = *self.acknowledged.get(&(worker, life, table, shard))?;
        Some(Pushes { life, first, end })
    }

    /// The worker whose pushes an element tells of.
    fn owner(&self, element: u64) -> WorkerId {
        WorkerId((element % (2 * u64::from(self.workers)) / 2) as u32)
    }
}

impl Checker for ExactlyOnce {
    fn on_sent(&mut self, frame: &FrameView<'_>, sender: &Actor) -> Result<(), String> {
        let (table, clock) = (frame.header.table, frame.header.clock);
        if let (NodeId::Worker(worker), Kind::Push, Some(player)) =
            (frame.from, frame.header.kind, sender.as_player())
            && clock < self.iterations
        {
            let life = player.life();
            let processes = self.issued.entry((worker, table)).or_default();
            match processes.last_mut() {
                Some(last) if last.life == life => last.end = (clock + 1).max(last.end),
                _ => processes.push(Pushes { life, first: clock, end: clock + 1 }),
            }
            self.requests.insert((worker, life, frame.header.request), (table, clock));
        }
        let Some((start, values)) = self.layout.parameters(frame) else { return Ok(()) };
        for (element, value) in (start..).zip(values) {
            let owner = self.owner(element);
            let issued = self.issued(owner, table);
            let most: f32 = issued.iter().map(|pushes| pushes.dense_tags(element)).sum();
            if value > most || value < 0.0 || value.fract() != 0.0 {
                return Err(format!(
                    "{} sends table `{}` with {value} in element {element}, which counts {owner}, who has pushed {}: a \
                     push was applied twice",
                    frame.from,
                    self.layout.table(table).name,
                    sentence(issued),
                ));
            }
        }
        Ok(())
    }

    fn on_delivered(&mut self, frame: &FrameView<'_>, receiver: &Actor) -> Result<(), String> {
        let (NodeId::Worker(worker), Some(shard), Some(player)) =
            (frame.to, frame.shard, receiver.as_player())
        else {
            return Ok(());
        };
        let life = player.life();
        // An answer to a push is an acknowledgement too.
        let is_answer = frame.header.kind == Kind::Params && frame.header.flags.has(Flags::LAST);
        let acknowledged = match frame.header.kind {
            Kind::PushAck => {
                ack::requests(frame.header, frame.payload).map_err(|error| error.to_string())?.collect()
            }
            _ if is_answer => vec![frame.header.request],
            _ => Vec::new(),
        };
        for request in acknowledged {
            if let Some((table, clock)) = self.requests.get(&(worker, life, request)) {
                let known = self.acknowledged.entry((worker, life, *table, shard)).or_default();
                *known = (clock + 1).max(*known);
            }
        }
        Ok(())
    }

    fn at_end(&mut self, cluster: &Cluster) -> Result<(), String> {
        for (number, spec) in (0..).zip(&self.layout.tables) {
            let table = TableId(number);
            let values = cluster.parameters(table);
            let rows = spec.rows.then(|| RowTags::new(self, table));
            for chunk in self.layout.chunks(table) {
                for element in chunk.start..chunk.start + u64::from(chunk.len) {
                    let owner = self.owner(element);
                    let may_lack = self.may_drop || self.mortal.contains(&owner);
                    let acknowledged = self.acknowledged(owner, table, chunk.shard).filter(|_| !may_lack);
                    let issued = self.issued(owner, table);
                    let tags = |pushes: &Pushes| match &rows {
                        None => pushes.dense_tags(element),
                        Some(rows) => rows.at(owner, element, pushes),
                    };
                    let least = acknowledged.as_ref().map_or(0.0, tags);
                    let most: f32 = issued.iter().map(tags).sum();
                    let value = values[element as usize];
                    if !(least..=most).contains(&value) {
                        let what = if value < least {
                            "an acknowledged push was lost"
                        } else {
                            "a push was applied twice"
                        };
                        return Err(format!(
                            "{} holds {value} in element {element} of table `{}`, which counts {owner} ({} acknowledged, {} \
                             issued, so {least} to {most}): {what}",
                            chunk.shard,
                            spec.name,
                            sentence(acknowledged.as_slice()),
                            sentence(issued),
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

impl Pushes {
    /// What they add to an element of a dense table that counts their worker.
    fn dense_tags(&self, element: u64) -> f32 {
        let up_to = |pushes: Clock| pushes * (pushes + 1) / 2;
        let is_count = element.is_multiple_of(2);
        if is_count { (self.end - self.first) as f32 } else { (up_to(self.end) - up_to(self.first)) as f32 }
    }
}

/// Which pushes, in words.
fn sentence(processes: &[Pushes]) -> String {
    let clocks = |pushes: &Pushes| format!("clocks {} to {}", pushes.first, pushes.end - 1);
    match processes {
        [] => "nothing".into(),
        _ => processes.iter().map(clocks).collect::<Vec<_>>().join(" and "),
    }
}

/// What rows hold of every worker, push by push.
struct RowTags {
    workers: u32,
    width: u64,
    /// For each worker, the rows that its push of each clock touched.
    touched: BTreeMap<WorkerId, Vec<Vec<u32>>>,
}

impl RowTags {
    fn new(checker: &ExactlyOnce, table: TableId) -> RowTags {
        let spec = checker.layout.table(table);
        let mut touched = BTreeMap::new();
        for worker in (0..checker.workers).map(WorkerId) {
            let end = checker.issued(worker, table).iter().map(|pushes| pushes.end).max().unwrap_or(0);
            let rows = (0..end).map(|clock| touched_rows(checker.seed, worker, clock, table, spec));
            touched.insert(worker, rows.collect());
        }
        RowTags { workers: checker.workers, width: spec.row_elements(), touched }
    }

    fn at(&self, owner: WorkerId, element: u64, pushes: &Pushes) -> f32 {
        let row = (element / self.width) as u32;
        let touches = |clock: &Clock| self.touched[&owner][*clock as usize].binary_search(&row).is_ok();
        let touching = (pushes.first..pushes.end).filter(touches);
        touching.map(|clock| tag(self.workers, owner, clock, element)).sum()
    }
}
