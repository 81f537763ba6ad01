//! Answers are never staler than the model allows, and neither is what workers compute on.
//!
//! Two things are held against the model in force on the shard: the version that the answer claims, and, where workers
//! push tags, the pushes that it holds. The same goes for a worker's copy when an iteration begins: it is within the bound that
//! the model has for workers, or it is the answer to a pull that was asked for this iteration.

use super::Checker;
use super::layout::Layout;
use super::policies::{Policies, held_at_most};
use crate::actor::Actor;
use crate::cluster::Cluster;
use crate::gradient::Gradients;
use crate::player::Player;
use crate::rule::FrameView;
use crate::scenario::ScenarioError;
use paramill_core::types::{Clock, NodeId, ShardId, TableId, Time, WorkerId};
use paramill_core::wire::{Flags, Kind, group};
use std::collections::{BTreeMap, BTreeSet};

/// Compares every answer with the model's bound.
#[derive(Debug)]
pub struct Staleness {
    layout: Layout,
    policies: Policies,
    /// The first clock of workers whose pushes can be counted. Those that may die are left out, since nobody waits for them
    /// then; those that are started late or anew are counted once they know where they begin.
    counted: BTreeMap<WorkerId, Clock>,
    /// Workers that come, or come again, while the job runs.
    new: BTreeSet<WorkerId>,
    workers: u64,
    /// What a worker pushes before it leaves: others go on without it then.
    iterations: Clock,
    dropped: bool,
    /// Whether the model changes while the job runs.
    switched: bool,
    /// The most pushes from which updates are held back, and with them pulls, if some are.
    held: Option<u64>,
    /// Whether workers have replicas of what is broadcast instead of copies that they ask for.
    is_broadcast: bool,
    /// What was asked, by shard, sender, table and the sender's number.
    asked: BTreeMap<(ShardId, NodeId, TableId, u64), Asked>,
    /// The last iteration for which an answer came, by worker, shard and table.
    answered: BTreeMap<(WorkerId, ShardId, TableId), Clock>,
    /// What each worker computes on, or did last.
    computed: BTreeMap<WorkerId, Reading>,
}

/// What a worker's process computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reading {
    life: u64,
    clock: Clock,
    /// All tables, unless it computes layer by layer.
    table: Option<TableId>,
}

/// A request for parameters.
#[derive(Debug, Clone, Copy)]
struct Asked {
    /// Iterations that the worker had completed.
    clock: Clock,
    /// How often the model had been switched when it came. An answer is released under the model of its time, and may wait for its
    /// connection while the model changes.
    switches: usize,
}

impl Staleness {
    /// For a job whose workers push these gradients; `mortal` workers may die, and `reborn` ones are started anew once.
    pub fn new(
        cluster: &Cluster,
        gradients: Gradients,
        mortal: &BTreeSet<WorkerId>,
        reborn: &BTreeSet<WorkerId>,
    ) -> Result<Staleness, ScenarioError> {
        let tagged = matches!(gradients, Gradients::Tagged { .. });
        let countable = cluster.worker_ids().filter(|worker| tagged && !mortal.contains(worker));
        let is_new = |worker: &WorkerId| worker.0 >= cluster.scenario().workers || reborn.contains(worker);
        let (new, original): (BTreeSet<_>, BTreeSet<_>) = countable.partition(is_new);
        let counted = original.into_iter().map(|worker| (worker, 0)).collect();
        let held = held_at_most(cluster.scenario())?;
        Ok(Staleness {
            layout: Layout::new(cluster.scenario())?,
            policies: Policies::new(cluster.scenario(), cluster.shard_ids())?,
            counted,
            new,
            workers: cluster.worker_ids().count() as u64,
            iterations: cluster.scenario().iterations,
            // Updates that are held back are not in the rounds of their gradients.
            dropped: held.is_some(),
            held,
            is_broadcast: cluster.scenario().policy.is_broadcast(),
            switched: !cluster.scenario().switches.is_empty(),
            asked: BTreeMap::new(),
            answered: BTreeMap::new(),
            computed: BTreeMap::new(),
        })
    }

    /// What a worker computes an iteration on is as fresh as it has to be: all tables, or the one whose layer it computes.
    fn check_copies(&self, worker: WorkerId, player: &Player, reading: Reading) -> Result<(), String> {
        let clock = reading.clock;
        let is_read = |(table, _): &(TableId, _)| reading.table.is_none_or(|read| read == *table);
        let tables = (0..).map(TableId).zip(&self.layout.tables).filter(is_read);
        for (table, spec) in tables.filter(|(table, spec)| !spec.rows && player.has_renewed(*table)) {
            let Some((values, version)) = player.values(table).zip(player.worker().version(table)) else {
                continue;
            };
            let mut most = Some(0);
            for chunk in self.layout.chunks(table) {
                let Some(model) = self.policies.model(chunk.shard, table) else { continue };
                let answered = self.answered.get(&(worker, chunk.shard, table)).copied();
                let bound = match model.cache_bound {
                    Some(bound) if answered < Some(clock) => Some(bound),
                    // Parts that partial synchrony goes on without have any age.
                    _ => model.bound.filter(|_| !model.drops).map(|bound| bound + self.held.unwrap_or(0)),
                };
                most = most.zip(bound).map(|(most, bound)| most.max(bound));
                let Some(bound) = bound else { continue };
                let needed = clock.saturating_sub(bound);
                let elements = chunk.start..chunk.start + u64::from(chunk.len);
                let owed = |element: &u64| self.owed(*element, needed);
                let lacking = elements.filter(|element| element % 2 == 0).find(|element| {
                    !self.dropped
                        && owed(element).is_some_and(|(_, owed)| values[*element as usize] < owed as f32)
                });
                if let Some((element, (owner, owed))) =
                    lacking.and_then(|it| owed(&it).map(|owed| (it, owed)))
                {
                    let count = values[element as usize];
                    return Err(format!(
                        "{worker} computes iteration {clock} on {count} pushes of {owner} in table `{}` (element {element}); \
                         `{}` asks for {owed} at least",
                        spec.name, model.sync
                    ));
                }
            }
            if most.is_some_and(|most| clock.saturating_sub(version) > most) {
                return Err(format!(
                    "{worker} computes iteration {clock} on version {version} of table `{}`, which may lack {most:?} rounds",
                    spec.name
                ));
            }
        }
        Ok(())
    }

    /// The owner of an element that counts pushes, and how many of its pushes a version has at least.
    fn owed(&self, element: u64, version: Clock) -> Option<(WorkerId, u64)> {
        let owner = WorkerId((element % (2 * self.workers) / 2) as u32);
        // Rounds before its first one did not wait for it, nor do those after its last.
        let until = version.min(self.iterations);
        self.counted.get(&owner).map(|first| (owner, until.saturating_sub(*first)))
    }
}

impl Staleness {
    /// An answer has come to a worker: of which iteration its request was.
    fn note_answered(&mut self, frame: &FrameView<'_>) {
        let header = frame.header;
        if let (NodeId::Worker(worker), Kind::Params, Some(shard)) =
            (frame.to, header.kind, sending_shard(frame))
            && header.flags.has(Flags::LAST)
            && !header.flags.has(Flags::NOW)
            && let Some(asked) = self.asked.get(&(shard, frame.to, header.table, header.request))
        {
            let last = self.answered.entry((worker, shard, header.table)).or_default();
            *last = asked.clock.max(*last);
        }
    }

    fn note_asked(&mut self, shard: ShardId, frame: &FrameView<'_>, request: u64, clock: Clock) {
        let table = frame.header.table;
        let switches = if self.switched { self.policies.switches(shard, table) } else { 0 };
        let asked = self.asked.entry((shard, frame.from, table, request));
        // Another process of the same name numbers its requests from the same number on.
        asked.and_modify(|asked| asked.clock = clock).or_insert(Asked { clock, switches });
    }
}

impl Checker for Staleness {
    fn on_delivered(&mut self, frame: &FrameView<'_>, receiver: &Actor) -> Result<(), String> {
        self.policies.follow(frame.to, receiver)?;
        self.note_answered(frame);
        let shard = match frame.to {
            NodeId::Shard(shard) => Some(shard),
            _ => frame.shard,
        };
        let Some(shard) = shard else { return Ok(()) };
        let header = frame.header;
        match header.kind {
            // A sum has a number of another kind, and is answered by nothing.
            Kind::Push if matches!(frame.from, NodeId::Aggregator(_)) && header.landing == 0 => {}
            Kind::Push => self.note_asked(shard, frame, header.request, header.clock.saturating_add(1)),
            Kind::Pull => self.note_asked(shard, frame, header.request, header.clock),
            Kind::Group => {
                let entries = group::decode(frame.payload).map_err(|error| error.to_string())?;
                for entry in entries {
                    self.note_asked(shard, frame, entry.request, header.clock.saturating_add(1));
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn on_sent(&mut self, frame: &FrameView<'_>, sender: &Actor) -> Result<(), String> {
        self.policies.follow(frame.from, sender)?;
        let header = frame.header;
        let shard = match (frame.from, frame.to, frame.shard) {
            (NodeId::Shard(shard), ..) => shard,
            // What an aggregator hands on was right when the shard said it.
            (NodeId::Aggregator(_), NodeId::Worker(_), Some(shard)) if !self.switched => shard,
            _ => return Ok(()),
        };
        if header.kind != Kind::Params || header.flags.has(Flags::NOW) {
            return Ok(());
        }
        let Some(model) = self.policies.model(shard, header.table) else { return Ok(()) };
        // Once a gradient was left out, or came after its round, counts say nothing about rounds any more.
        self.dropped |= model.drops || model.closes_early;
        let Some(Asked { clock, switches }) =
            self.asked.get(&(shard, frame.to, header.table, header.request))
        else {
            return Err(format!("{shard} answers {}, which has not asked", frame.to));
        };
        let Some(bound) = self.policies.bound_since(shard, header.table, *switches) else { return Ok(()) };
        let needed = clock.saturating_sub(bound);
        let name = &self.layout.table(header.table).name;
        if header.version < needed {
            return Err(format!(
                "{shard} answers {} after clock {} with version {} of table `{name}`; `{}` asks for {needed} at least",
                frame.to, clock, header.version, model.sync
            ));
        }
        let Some((start, values)) = self.layout.parameters(frame).filter(|_| !self.dropped) else {
            return Ok(());
        };
        for (element, count) in (start..).zip(values).filter(|(element, _)| element % 2 == 0) {
            if let Some((owner, owed)) = self.owed(element, needed)
                && count < owed as f32
            {
                return Err(format!(
                    "{shard} answers {} after clock {} with {count} pushes of {owner} in table `{name}` (element \
                     {element}); `{}` asks for {owed} at least",
                    frame.to, clock, model.sync
                ));
            }
        }
        Ok(())
    }

    fn on_settled(&mut self, _now: Time, node: NodeId, actor: &Actor) -> Result<(), String> {
        if let (NodeId::Worker(worker), Some(player)) = (node, actor.as_player())
            && self.new.contains(&worker)
            // The process that was there from the start dies.
            && player.life() > 0
            && let Some(first) = player.first_clock()
        {
            self.counted.insert(worker, first);
        }
        // Workers hear of another model before some shards do, and after others.
        if let (NodeId::Worker(worker), Some(player)) = (node, actor.as_player())
            && !self.switched
            && !self.is_broadcast
            && let Some((clock, table)) = player.computing()
            && let reading = (Reading { life: player.life(), clock, table })
            && self.computed.insert(worker, reading) != Some(reading)
        {
            self.check_copies(worker, player, reading)?;
        }
        Ok(())
    }
}

/// The shard whose answer a frame brings, through an aggregator or not.
fn sending_shard(frame: &FrameView<'_>) -> Option<ShardId> {
    match frame.from {
        NodeId::Shard(shard) => Some(shard),
        NodeId::Aggregator(_) => frame.shard,
        _ => None,
    }
}
