//! Answers are never staler than the model allows.
//!
//! Two things are held against the model in force on the shard: the version that the answer claims, and, where workers
//! push tags, the pushes that it holds.

use super::Checker;
use super::layout::Layout;
use super::policies::{Policies, closes_early, drops};
use crate::actor::Actor;
use crate::cluster::Cluster;
use crate::gradient::Gradients;
use crate::rule::FrameView;
use crate::scenario::ScenarioError;
use paramill_core::types::{NodeId, ShardId, TableId, WorkerId};
use paramill_core::wire::{Flags, Kind};
use std::collections::{BTreeMap, BTreeSet};

/// Compares every answer with the model's bound.
#[derive(Debug)]
pub struct Staleness {
    layout: Layout,
    policies: Policies,
    /// Workers whose pushes can be counted; those that may die are left out, since nobody waits for them then.
    counted: BTreeSet<WorkerId>,
    workers: u64,
    dropped: bool,
    /// Whether the model changes while the job runs.
    switched: bool,
    /// How often the model had been switched when a request came, by shard, sender, table and number. An answer is released
    /// under the model of its time, and may wait for its connection while the model changes.
    asked: BTreeMap<(ShardId, NodeId, TableId, u64), usize>,
}

impl Staleness {
    /// For a job whose workers push these gradients; `mortal` workers may die.
    pub fn new(
        cluster: &Cluster,
        gradients: Gradients,
        mortal: &BTreeSet<WorkerId>,
    ) -> Result<Staleness, ScenarioError> {
        let tagged = matches!(gradients, Gradients::Tagged { .. });
        let counted = cluster.worker_ids().filter(|worker| tagged && !mortal.contains(worker)).collect();
        Ok(Staleness {
            layout: Layout::new(cluster.scenario())?,
            policies: Policies::new(cluster.scenario(), cluster.shard_ids())?,
            counted,
            workers: cluster.scenario().workers.into(),
            dropped: false,
            switched: !cluster.scenario().switches.is_empty(),
            asked: BTreeMap::new(),
        })
    }
}

impl Checker for Staleness {
    fn on_delivered(&mut self, frame: &FrameView<'_>, _receiver: &Actor) -> Result<(), String> {
        self.policies.on_delivered(frame)?;
        if let (NodeId::Shard(shard), Kind::Push | Kind::Pull) = (frame.to, frame.header.kind)
            && self.switched
        {
            let switches = self.policies.switches(shard, frame.header.table);
            let request = (shard, frame.from, frame.header.table, frame.header.request);
            self.asked.entry(request).or_insert(switches);
        }
        Ok(())
    }

    fn on_sent(&mut self, frame: &FrameView<'_>, _sender: &Actor) -> Result<(), String> {
        let header = frame.header;
        let shard = match (frame.from, frame.to) {
            (NodeId::Shard(shard), _) => shard,
            // What an aggregator hands on was right when the shard said it.
            (NodeId::Aggregator(_), NodeId::Through(_, shard)) if !self.switched => shard,
            _ => return Ok(()),
        };
        if header.kind != Kind::Params || header.flags.has(Flags::NOW) {
            return Ok(());
        }
        let Some(model) = self.policies.model(shard, header.table) else { return Ok(()) };
        // Once a gradient was left out, or came after its round, counts say nothing about rounds any more.
        self.dropped |= drops(&model.sync) || closes_early(&model.sync);
        let since = match self.switched {
            // What is answered before it is asked for may be as old as the job.
            true => self.asked.get(&(shard, frame.to, header.table, header.request)).copied().unwrap_or(0),
            false => 0,
        };
        let Some(bound) = self.policies.bound_since(shard, header.table, since) else { return Ok(()) };
        let needed = header.clock.saturating_sub(bound);
        let name = &self.layout.table(header.table).name;
        if header.version < needed {
            return Err(format!(
                "{shard} answers {} after clock {} with version {} of table `{name}`; `{}` asks for {needed} at least",
                frame.to, header.clock, header.version, model.sync
            ));
        }
        let Some((start, values)) = self.layout.parameters(frame).filter(|_| !self.dropped) else {
            return Ok(());
        };
        for (element, count) in (start..).zip(values).filter(|(element, _)| element % 2 == 0) {
            let owner = WorkerId((element % (2 * self.workers) / 2) as u32);
            if self.counted.contains(&owner) && count < needed as f32 {
                return Err(format!(
                    "{shard} answers {} after clock {} with {count} pushes of {owner} in table `{name}` (element \
                     {element}); `{}` asks for {needed} at least",
                    frame.to, header.clock, model.sync
                ));
            }
        }
        Ok(())
    }
}
