//! No acknowledged push is lost, and none is applied twice.
//!
//! Workers push tags ([`crate::gradient::tag`]), so that parameters say how many pushes of each worker they hold and
//! which. What was pushed and acknowledged is counted on the wire.

use super::Checker;
use super::layout::Layout;
use super::policies::drops;
use crate::actor::Actor;
use crate::cluster::Cluster;
use crate::gradient::{tag, touched_rows};
use crate::rule::FrameView;
use crate::scenario::{Scenario, ScenarioError};
use paramill_core::policy::Axis;
use paramill_core::types::{Clock, NodeId, ShardId, TableId, WorkerId};
use paramill_core::wire::{Flags, Kind, ack};
use std::collections::{BTreeMap, BTreeSet};

/// Counts pushes on the wire and in the parameters.
#[derive(Debug)]
pub struct ExactlyOnce {
    layout: Layout,
    workers: u32,
    seed: u64,
    /// Whether gradients may be left out for coming late.
    may_drop: bool,
    issued: BTreeMap<(WorkerId, TableId), Clock>,
    /// Which push a worker's request is.
    requests: BTreeMap<(WorkerId, u64), (TableId, Clock)>,
    acknowledged: BTreeMap<(WorkerId, TableId, ShardId), Clock>,
    /// Workers that may die, and be started anew at a later clock: what they left out is not known.
    mortal: BTreeSet<WorkerId>,
}

impl ExactlyOnce {
    /// For a job whose workers push tags under `sgd:lr=1` and a sum over workers.
    pub fn new(scenario: &Scenario, mortal: &BTreeSet<WorkerId>) -> Result<ExactlyOnce, ScenarioError> {
        let rules = scenario.switches.iter().map(|switch| &switch.change).chain(&scenario.overrides);
        let exceptions = rules.filter_map(|rule| rule.policies.get(Axis::Sync));
        let mut models = exceptions.chain([scenario.policy.get(Axis::Sync)]);
        Ok(ExactlyOnce {
            layout: Layout::new(scenario)?,
            workers: scenario.workers,
            seed: scenario.seed,
            may_drop: models.any(drops),
            issued: BTreeMap::new(),
            requests: BTreeMap::new(),
            acknowledged: BTreeMap::new(),
            mortal: mortal.clone(),
        })
    }

    /// What an element of a dense table holds of its worker after that worker's first `pushes` pushes.
    fn dense_tags(&self, element: u64, pushes: Clock) -> f32 {
        let is_count = element.is_multiple_of(2);
        if is_count { pushes as f32 } else { (pushes * (pushes + 1) / 2) as f32 }
    }

    /// The worker whose pushes an element tells of.
    fn owner(&self, element: u64) -> WorkerId {
        WorkerId((element % (2 * u64::from(self.workers)) / 2) as u32)
    }
}

impl Checker for ExactlyOnce {
    fn on_sent(&mut self, frame: &FrameView<'_>, _sender: &Actor) -> Result<(), String> {
        let (table, clock) = (frame.header.table, frame.header.clock);
        if let (NodeId::Worker(worker), Kind::Push) = (frame.from, frame.header.kind) {
            let issued = self.issued.entry((worker, table)).or_default();
            *issued = (clock + 1).max(*issued);
            self.requests.insert((worker, frame.header.request), (table, clock));
        }
        let Some((start, values)) = self.layout.parameters(frame) else { return Ok(()) };
        for (element, value) in (start..).zip(values) {
            let owner = self.owner(element);
            let issued = self.issued.get(&(owner, table)).copied().unwrap_or(0);
            if value > self.dense_tags(element, issued) || value < 0.0 || value.fract() != 0.0 {
                return Err(format!(
                    "{} sends table `{}` with {value} in element {element}, which counts {owner}, who has pushed {issued} \
                     times: a push was applied twice",
                    frame.from,
                    self.layout.table(table).name
                ));
            }
        }
        Ok(())
    }

    fn on_delivered(&mut self, frame: &FrameView<'_>, _receiver: &Actor) -> Result<(), String> {
        let (NodeId::Worker(worker), NodeId::Shard(shard)) = (frame.to, frame.from) else { return Ok(()) };
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
            if let Some((table, clock)) = self.requests.get(&(worker, request)) {
                let known = self.acknowledged.entry((worker, *table, shard)).or_default();
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
                    let acknowledged =
                        self.acknowledged.get(&(owner, table, chunk.shard)).copied().unwrap_or(0);
                    let issued = self.issued.get(&(owner, table)).copied().unwrap_or(0);
                    let tags = |pushes| match &rows {
                        None => self.dense_tags(element, pushes),
                        Some(rows) => rows.at(owner, element, pushes),
                    };
                    let may_lack = self.may_drop || self.mortal.contains(&owner);
                    let (least, most) = (if may_lack { 0.0 } else { tags(acknowledged) }, tags(issued));
                    let value = values[element as usize];
                    if !(least..=most).contains(&value) {
                        let what = if value < least {
                            "an acknowledged push was lost"
                        } else {
                            "a push was applied twice"
                        };
                        return Err(format!(
                            "{} holds {value} in element {element} of table `{}`, which counts {owner} ({acknowledged} \
                             pushes acknowledged, {issued} issued, so {least} to {most}): {what}",
                            chunk.shard, spec.name
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

/// What rows hold of every worker, push by push.
struct RowTags {
    workers: u32,
    width: u64,
    /// For each worker, the rows that each of its pushes touched.
    touched: BTreeMap<WorkerId, Vec<Vec<u32>>>,
}

impl RowTags {
    fn new(checker: &ExactlyOnce, table: TableId) -> RowTags {
        let spec = checker.layout.table(table);
        let mut touched = BTreeMap::new();
        for worker in (0..checker.workers).map(WorkerId) {
            let issued = checker.issued.get(&(worker, table)).copied().unwrap_or(0);
            let rows = (0..issued).map(|clock| touched_rows(checker.seed, worker, clock, table, spec));
            touched.insert(worker, rows.collect());
        }
        RowTags { workers: checker.workers, width: spec.row_elements(), touched }
    }

    fn at(&self, owner: WorkerId, element: u64, pushes: Clock) -> f32 {
        let row = (element / self.width) as u32;
        let pushed = self.touched[&owner].iter().take(pushes as usize).enumerate();
        let touching = pushed.filter(|(_, rows)| rows.binary_search(&row).is_ok());
        touching.map(|(clock, _)| tag(self.workers, owner, clock as Clock, element)).sum()
    }
}
