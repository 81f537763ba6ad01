//! What a seed means.

use super::components::{self, Components, Wanted};
use super::dice::Dice;
use crate::canary::Canary;
use crate::cluster::{Cluster, Play};
use crate::compute::{ComputeModel, SendMode};
use crate::gradient::Gradients;
use crate::judge::JudgeModel;
use crate::network::{BackgroundConfig, Fill, NetworkConfig, RateChange, ThreeTier, Topology};
use crate::rules::{Closed, Partition};
use crate::scenario::{Drain, Scenario, ScenarioError, Switch, TableConfig};
use paramill_core::consistency::SyncPolicy;
use paramill_core::policy::{AXES, Axis, Info, Order, Policies, Policy, PolicyOverride, Text};
use paramill_core::prng::Prng;
use paramill_core::registry::Registry;
use paramill_core::spec::SpecError;
use paramill_core::table::{TableSpec, glob_matches};
use paramill_core::types::{AggregatorId, NodeId, ServerId, ShardId, Time, WorkerId};
use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

/// A world that was drawn from a seed.
#[derive(Debug, Clone)]
pub struct Drawn {
    /// The job, the network and the faults.
    pub scenario: Scenario,
    /// How applications behave.
    pub play: Play,
    /// The components of the job, as `axis/name`.
    pub components: Vec<String>,
    /// Aggregators that die, when, and after which time they are started anew.
    pub restarts: Vec<(NodeId, Time, Duration)>,
    /// Shards in whose place another process goes on, and when.
    pub handovers: Vec<(ShardId, Time)>,
    /// Servers that die once every shard has a copy, from when on, and how long they stay away.
    pub deaths: Vec<(ServerId, Time, Duration)>,
    /// When further workers are started.
    pub joins: Vec<Time>,
    /// Nodes that are cut off, and when.
    pub partitions: Vec<(Vec<NodeId>, Time, Time)>,
    /// Nodes that take no new connections, and when.
    pub closures: Vec<(NodeId, Time, Time)>,
    /// Workers that may not finish.
    pub mortal: BTreeSet<WorkerId>,
    /// Workers that die and are started anew.
    pub reborn: BTreeSet<WorkerId>,
    /// When all faults end.
    pub heal_at: Time,
    /// When everybody must have finished.
    pub deadline: Time,
}

impl Drawn {
    /// The world of a seed, of the components that this registry has. The error says what cannot be drawn.
    pub fn new(seed: u64, registry: &Registry) -> Result<Drawn, String> {
        let components = Components::of(registry);
        let mut dice = Dice::new(Prng::fork(seed, 0x7377_6172));
        let mut scenario = job(&mut dice, seed);
        let exact = dice.chance(0.6);
        let wanted = Wanted {
            exact,
            workers: scenario.workers,
            has_dense: scenario.tables.iter().any(|table| !table.rows),
        };
        if exact {
            scenario = scenario.with(Axis::Reduce, "sum");
        }
        for axis in [Axis::Placement, Axis::Optimizer] {
            scenario = scenario.with(axis, components.text(&mut dice, axis, wanted)?);
        }
        models(&mut dice, &components, wanted, &mut scenario)?;
        // Faults are for the time that the job takes, more or less.
        let expected_s = scenario.iterations as f64 * scenario.compute.step_ms * 2e-3;
        let heal_at = Time::from_secs_f64(0.1 + expected_s * dice.between(0.2, 2.0));
        let Faults { words, mortal, reborn } = faults(&mut dice, &scenario, heal_at);
        scenario.faults = words;
        let mut partitions = partitions(&mut dice, &scenario, heal_at);
        let mut closures = closures(&mut dice, &scenario, heal_at);
        // What follows is drawn apart, so that a world is the same but for that.
        let mut dice = Dice::new(Prng::fork(seed, 0x6167_6772));
        aggregators(&mut dice, &mut scenario, &mut partitions, &mut closures);
        let mut restarts = restarts(&mut dice, &scenario, heal_at);
        aggregator_cores(&mut Dice::new(Prng::fork(seed, 0x636f_7265)), &mut scenario);
        rack_aggregators(
            &mut Dice::new(Prng::fork(seed, 0x7261_636b)),
            &mut scenario,
            heal_at,
            &mut partitions,
            &mut closures,
            &mut restarts,
        );
        let joins = joins(&mut Dice::new(Prng::fork(seed, 0x6a6f_696e)), heal_at);
        slow_connections(&mut Dice::new(Prng::fork(seed, 0x736c_6f77)), &mut scenario);
        windows(&mut Dice::new(Prng::fork(seed, 0x7769_6e64)), &mut scenario);
        tiers(&mut Dice::new(Prng::fork(seed, 0x7469_6572)), &mut scenario, heal_at);
        let mut dice = Dice::new(Prng::fork(seed, 0x636f_6465));
        codecs(&mut dice, &components, wanted, &mut scenario)?;
        broadcast(&mut Dice::new(Prng::fork(seed, 0x6263_6173)), &components, wanted, &mut scenario)?;
        readers(&mut Dice::new(Prng::fork(seed, 0x7265_6164)), &mut scenario);
        local(&mut Dice::new(Prng::fork(seed, 0x6c6f_6361)), &components, wanted, &mut scenario)?;
        transmission(&mut Dice::new(Prng::fork(seed, 0x7472_616e)), &mut scenario);
        held(&mut Dice::new(Prng::fork(seed, 0x6865_6c64)), &components, wanted, registry, &mut scenario)?;
        coordinator(&mut Dice::new(Prng::fork(seed, 0x636f_6f72)), &mut scenario, heal_at);
        let is_partial = models_of(&scenario).any(|sync| sync.starts_with("psp"));
        let slabs = dice.chance(0.4) && wanted.has_dense;
        // What a server refuses is not counted; and an application that goes on without it keeps others waiting at a
        // second table, which they have to read before they can push the first again.
        let has_sparse = scenario.tables.iter().any(|table| table.rows);
        let is_uncountable = slabs && (exact || has_sparse || scenario.tables.len() > 1);
        // What is clipped has no number any more that it could be counted by.
        let switches_to = |policy: &str| {
            let is_it = |switch: &Switch| switch.change.policies.get(Axis::NonFinite) == Some(policy);
            scenario.switches.iter().any(is_it)
        };
        let is_uncountable = is_uncountable || (exact && switches_to("clip"));
        // A push that left under `clip` may come under `reject`, which ends an application that does not exchange slabs.
        let is_uncountable = is_uncountable || (!slabs && switches_to("clip") && switches_to("reject"));
        let nan_p = if dice.chance(0.3) && !is_uncountable { dice.magnitude(0.005, 0.2) } else { 0.0 };
        let workers = scenario.workers + joins.len() as u32;
        let gradients = if exact { Gradients::Tagged { workers } } else { Gradients::Quadratic };
        let play = Play {
            gradients,
            slabs,
            nan_p,
            // Blocks that come late change what is read, where tables are pulled partially; nothing changes a slab.
            watches_memory: !is_partial || slabs,
            several_addresses: dice.chance(0.3),
            canary: None,
        };
        let slowest_step = scenario.compute.step_ms * 1e-3 * (1.0 + 8.0 * scenario.compute.jitter) * 4.0;
        let step = 4.0 * slowest_step + 0.2 + passage_s(&scenario, workers) + crossing_s(&scenario, workers);
        let budget = 140.0 + scenario.iterations as f64 * step;
        let deadline = heal_at + Duration::from_secs_f64(budget);
        let components = components::used(registry, &scenario);
        let handovers = handovers(&mut Dice::new(Prng::fork(seed, 0x696d_6167)), &scenario, heal_at);
        let mut handovers = handovers;
        let deaths = deaths(&mut Dice::new(Prng::fork(seed, 0x6465_6164)), &mut scenario, heal_at);
        orders(&mut Dice::new(Prng::fork(seed, 0x6f72_6465)), &mut scenario, heal_at);
        if !scenario.drains.is_empty() {
            // Its shard may have moved elsewhere.
            handovers.clear();
        }
        if !deaths.is_empty() {
            // Another fault at the same time may be one too many.
            handovers.clear();
            partitions.clear();
            closures.clear();
        }
        Ok(Drawn {
            scenario,
            play,
            components,
            restarts,
            handovers,
            deaths,
            joins,
            partitions,
            closures,
            mortal,
            reborn,
            heal_at,
            deadline,
        })
    }

    /// The world, set up.
    pub fn cluster(&self, canary: Option<Canary>) -> Result<Cluster, ScenarioError> {
        let mut cluster = Cluster::with(&self.scenario, Play { canary, ..self.play })?;
        for (node, at, after) in &self.restarts {
            cluster.crash_and_restart(*node, *at, *after);
        }
        for (shard, at) in &self.handovers {
            cluster.replace_by_image(*shard, *at);
        }
        for (server, at, after) in &self.deaths {
            cluster.crash_copied_server(*server, *at, self.heal_at, Some(*after));
        }
        for at in &self.joins {
            cluster.join_later(*at);
        }
        for (island, from, until) in &self.partitions {
            cluster.world.rules().add(Partition::new(island.clone(), *from, *until));
        }
        for (node, from, until) in &self.closures {
            cluster.world.rules().add(Closed::new(*node, *from, *until));
        }
        Ok(cluster)
    }

    /// Whether the job must end with the same bits with and without faults.
    pub fn has_calm_twin(&self) -> bool {
        let Scenario { policy, overrides, switches, .. } = &self.scenario;
        let synchronous =
            policy.get(Axis::Sync).starts_with("bsp") && overrides.is_empty() && switches.is_empty();
        let is_plain = [Axis::Codec, Axis::AnswerCodec].iter().all(|&axis| policy.get(axis) == "none");
        synchronous
            && is_plain
            && policy.order() == Order::Ranked
            && self.mortal.is_empty()
            && self.reborn.is_empty()
            && self.joins.is_empty()
            && self.play.nan_p == 0.0
            && self.play.gradients == Gradients::Quadratic
    }

    /// The same job without faults and readers, and with nothing between workers and servers.
    pub fn calm(&self) -> Scenario {
        Scenario {
            faults: Vec::new(),
            aggregators: 0,
            rack_aggregators: 0,
            readers: 0,
            ..self.scenario.clone()
        }
    }
}

/// When gradients leave, and what overtakes what.
fn transmission(dice: &mut Dice, scenario: &mut Scenario) {
    let leaves_out = models_of(scenario).any(|sync| sync.starts_with("quorum"));
    if dice.chance(0.4) && !leaves_out && !scenario.policy.is_local() {
        scenario.compute.send = SendMode::Layerwise;
    }
    if dice.chance(0.3) {
        scenario.policy = scenario.policy.clone().with(Axis::Priority, "none");
    }
    if dice.chance(0.1) {
        let policies = Policies::of([(Axis::Priority, dice.pick(&["front", "none"]))]);
        let change = PolicyOverride::new(dice.pick(&["*", "fc*", "*1"]), policies);
        scenario.switches.push(Switch { at_s: dice.between(0.0, 2.0), change });
    }
}

/// Every consistency model of a job.
fn models_of(scenario: &Scenario) -> impl Iterator<Item = &str> {
    let changes = scenario.switches.iter().map(|switch| &switch.change).chain(&scenario.overrides);
    let exceptions = changes.filter_map(|change| change.policies.get(Axis::Sync));
    exceptions.chain([scenario.policy.get(Axis::Sync)])
}

impl fmt::Display for Drawn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Scenario { workers, servers, cores, iterations, policy, .. } = &self.scenario;
        write!(f, "{workers} workers, {servers} servers of {cores} cores, ")?;
        if self.scenario.aggregators > 0 {
            let Scenario { aggregators, aggregator_cores, rack_aggregators, hold_ms, .. } = &self.scenario;
            write!(
                f,
                "{aggregators} aggregators under {rack_aggregators} of racks, of {aggregator_cores} cores, that hold for \
                 {hold_ms:.2} ms, "
            )?;
        }
        if self.scenario.readers > 0 {
            write!(f, "{} readers, ", self.scenario.readers)?;
        }
        write!(f, "{iterations} iterations of ")?;
        let tables = self.scenario.tables.iter().map(|table| {
            let kind = if table.rows { "sparse" } else { "dense" };
            format!("{kind} {:?}", table.shape)
        });
        write!(f, "{}; {}", tables.collect::<Vec<_>>().join(" + "), policy.changed())?;
        for rule in &self.scenario.overrides {
            write!(f, "; {} on `{}`", rule.policies, rule.table)?;
        }
        for switch in &self.scenario.switches {
            write!(f, "; {} from {:.2} s on", switch.change.policies, switch.at_s)?;
        }
        for fault in &self.scenario.faults {
            write!(f, "; {fault}")?;
        }
        for (island, from, until) in &self.partitions {
            let nodes: Vec<String> = island.iter().map(NodeId::to_string).collect();
            write!(
                f,
                "; {} cut off from {:.2} to {:.2} s",
                nodes.join(" and "),
                from.as_secs_f64(),
                until.as_secs_f64()
            )?;
        }
        for (node, at, after) in &self.restarts {
            let (at, after) = (at.as_secs_f64(), after.as_secs_f64());
            write!(f, "; {node} dies at {at:.2} s and is started anew {after:.3} s later")?;
        }
        for (shard, at) in &self.handovers {
            write!(f, "; another process goes on in the place of {shard} at {:.2} s", at.as_secs_f64())?;
        }
        if self.scenario.replicas > 0 {
            write!(f, "; every shard has a copy")?;
        }
        for (server, at, after) in &self.deaths {
            let (at, after) = (at.as_secs_f64(), after.as_secs_f64());
            write!(f, "; {server} dies after {at:.2} s and is started anew {after:.3} s later")?;
        }
        for Drain { at_s, server } in &self.scenario.drains {
            write!(f, "; server {server} is drained at {at_s:.2} s")?;
        }
        if self.scenario.status_every_s > 0.0 {
            write!(f, "; the status is asked for every {:.3} s", self.scenario.status_every_s)?;
        }
        for at in &self.joins {
            write!(f, "; another worker comes at {:.2} s", at.as_secs_f64())?;
        }
        let Play { slabs, nan_p, several_addresses, .. } = self.play;
        if slabs {
            write!(f, "; slabs")?;
        }
        if self.scenario.compute.send == SendMode::Layerwise {
            write!(f, "; layer by layer")?;
        }
        if nan_p > 0.0 {
            write!(f, "; NaN with probability {nan_p:.3}")?;
        }
        if several_addresses {
            write!(f, "; several addresses")?;
        }
        let NetworkConfig { window_bytes, waiting_frames, topology, background, changes, .. } =
            &self.scenario.network;
        if *topology != Topology::Star {
            write!(f, "; {topology}")?;
        }
        for BackgroundConfig { from, to, flows, gbit_per_s, from_s, .. } in background {
            let rate = gbit_per_s.map_or("greedy".to_owned(), |rate| format!("of {rate:.3} Gbit/s"));
            write!(f, "; {flows} flows {rate} from `{from}` to `{to}` from {from_s:.2} s on")?;
        }
        for RateChange { at_s, link, gbit_per_s } in changes {
            write!(f, "; `{link}` has {gbit_per_s:.4} Gbit/s from {at_s:.2} s on")?;
        }
        write!(f, "; windows of {window_bytes} bytes, {waiting_frames} frames wait")?;
        for (node, from, until) in &self.closures {
            let (from, until) = (from.as_secs_f64(), until.as_secs_f64());
            write!(f, "; {node} takes no connections from {from:.2} to {until:.2} s")?;
        }
        write!(f, "; healed at {:.2} s", self.heal_at.as_secs_f64())
    }
}

fn job(dice: &mut Dice, seed: u64) -> Scenario {
    let tables = (0..dice.whole(1, 3)).map(|number| table(dice, number)).collect();
    let latency_us = dice.magnitude(10.0, 5e3);
    let network = NetworkConfig {
        latency_us,
        jitter_us: if dice.chance(0.7) { dice.between(0.0, 2.0) * latency_us } else { 0.0 },
        gbit_per_s: [0.0, 0.01, 0.1, 1.0, 10.0][dice.whole(0, 4) as usize],
        wire_scale: dice.magnitude(1.0, 20.0),
        handling_us: dice.magnitude(0.1, 100.0),
        ..NetworkConfig::default()
    };
    let compute = ComputeModel {
        step_ms: dice.magnitude(0.5, 50.0),
        jitter: dice.between(0.0, 1.0),
        straggle_p: if dice.chance(0.3) { dice.between(0.0, 0.1) } else { 0.0 },
        straggle_factor: dice.between(1.0, 10.0),
        ..ComputeModel::default()
    };
    let judge = JudgeModel {
        lead: dice.whole(0, 3) as u32,
        takes_ms: if dice.chance(0.5) { dice.magnitude(0.1, 50.0) } else { 0.0 },
        fails_p: if dice.chance(0.3) { dice.between(0.0, 0.5) } else { 0.0 },
    };
    Scenario {
        seed,
        workers: dice.whole(1, 8) as u32,
        servers: dice.whole(1, 4) as u32,
        cores: dice.whole(1, 2) as u32,
        iterations: dice.whole(3, 60),
        policy: Policy::default()
            .with(Axis::Order, if dice.chance(0.5) { "ranked" } else { "arrival" })
            .with(Axis::Chunk, format!("{}B", 4 * dice.whole(6, 64))),
        colocated: dice.chance(0.3),
        tables,
        network,
        compute,
        judge,
        ..Scenario::default()
    }
}

fn table(dice: &mut Dice, number: u64) -> TableConfig {
    let name = format!("{}{number}", dice.pick(&["conv", "fc", "emb"]));
    if dice.chance(0.3) {
        return TableConfig { name, shape: vec![dice.whole(1, 60), dice.whole(1, 6)], rows: true, macs: 0 };
    }
    TableConfig { name, shape: vec![dice.magnitude(1.0, 500.0) as u64], rows: false, macs: 0 }
}

fn models(
    dice: &mut Dice,
    components: &Components<'_>,
    wanted: Wanted,
    scenario: &mut Scenario,
) -> Result<(), String> {
    let mut model = || components.text(dice, Axis::Sync, wanted);
    let (first, another) = (model()?, model()?);
    if dice.chance(0.08) {
        // The baseline without overlap has one scheduler, and so one model.
        scenario.policy = scenario.policy.clone().with(Axis::Sync, "bsp:overlap=false");
        return Ok(());
    }
    scenario.policy = scenario.policy.clone().with(Axis::Sync, first.as_str());
    if dice.chance(0.2) {
        let server =
            dice.chance(0.5).then(|| ServerId(dice.whole(0, u64::from(scenario.servers) - 1) as u32));
        let table = dice.pick(&["*0", "conv*", "*"]).to_owned();
        // An exception that no table matches would be refused.
        if scenario.tables.iter().any(|known| glob_matches(&table, &known.name)) {
            let policies = Policies::of([(Axis::Sync, another)]);
            scenario.overrides.push(PolicyOverride::new(table, policies).on(server));
        }
    }
    // Every policy that may change while a job runs does so; some of them are drawn apart.
    let is_apart = |axis| matches!(axis, Axis::Priority | Axis::Hold);
    let may_change = |info: &&Info| info.fixed.is_none() && !is_apart(info.axis);
    let changeable: Vec<&Info> = AXES.iter().filter(may_change).collect();
    for _ in 0..dice.whole(0, 2) {
        let info = changeable[dice.below(changeable.len())];
        let text = match info.text {
            Text::Component(_) => components.text(dice, info.axis, wanted)?,
            Text::Choice(words) => dice.pick(words).to_owned(),
            Text::Bytes => format!("{}B", 4 * dice.whole(6, 64)),
        };
        let at_s = dice.between(0.0, 2.0);
        let table = dice.pick(&["*", "*", "fc*", "*1"]).to_owned();
        let change = PolicyOverride::new(table, Policies::of([(info.axis, text)]));
        scenario.switches.push(Switch { at_s, change });
    }
    Ok(())
}

/// Whether a job can be started.
fn check(registry: &Registry, scenario: &Scenario) -> Result<(), SpecError> {
    let config = scenario.job_config("drawn");
    config.check(registry).and_then(|()| config.check_tables(registry, &scenario.table_specs()))
}

/// Codecs of both directions, where the job as a whole may have them.
fn codecs(
    dice: &mut Dice,
    components: &Components<'_>,
    wanted: Wanted,
    scenario: &mut Scenario,
) -> Result<(), String> {
    for choice in [(Axis::Codec, 0.5), (Axis::AnswerCodec, 0.4)] {
        if let Some(encoded) = sometimes(dice, choice, (components, wanted), scenario, |_| true)? {
            *scenario = encoded;
        }
    }
    check(components.registry(), scenario).map_err(|error| error.to_string())
}

/// Draws a text for an axis with probability `p`. The scenario with it, if it can be started and all of its models are possible then,
/// those of switches too: they are checked when they are made, by the coordinator.
fn sometimes(
    dice: &mut Dice,
    (axis, p): (Axis, f64),
    (components, wanted): (&Components<'_>, Wanted),
    scenario: &Scenario,
    is_possible: impl Fn(&SyncPolicy) -> bool,
) -> Result<Option<Scenario>, String> {
    if !dice.chance(p) {
        return Ok(None);
    }
    let drawn = scenario.clone().with(axis, components.text(dice, axis, wanted)?);
    let registry = components.registry();
    let is_possible =
        |sync: &str| SyncPolicy::parse(&registry.consistency, sync).is_ok_and(|sync| is_possible(&sync));
    let can_start = check(registry, &drawn).is_ok() && models_of(&drawn).all(is_possible);
    Ok(can_start.then_some(drawn))
}

/// Sometimes versions are broadcast, where all models and tables let them be.
fn broadcast(
    dice: &mut Dice,
    components: &Components<'_>,
    wanted: Wanted,
    scenario: &mut Scenario,
) -> Result<(), String> {
    let is_possible =
        |sync: &SyncPolicy| sync.model.version_needed(0).is_some() && sync.overlap && !sync.names_cache();
    let drawn = sometimes(dice, (Axis::Broadcast, 0.5), (components, wanted), scenario, is_possible)?;
    let Some(with_trees) = drawn else { return Ok(()) };
    *scenario = with_trees;
    // Rows are broadcast as differences, too, which answers to their pulls cannot be.
    let encoded = sometimes(dice, (Axis::AnswerCodec, 0.4), (components, wanted), scenario, |_| true)?;
    if let Some(encoded) = encoded {
        *scenario = encoded;
    }
    Ok(())
}

/// Sometimes workers make steps by themselves, where all models and tables let them.
fn local(
    dice: &mut Dice,
    components: &Components<'_>,
    wanted: Wanted,
    scenario: &mut Scenario,
) -> Result<(), String> {
    let is_possible =
        |sync: &SyncPolicy| sync.partial_pull().is_none() && sync.overlap && !sync.model.catches_up();
    let drawn = sometimes(dice, (Axis::Local, 0.4), (components, wanted), scenario, is_possible)?;
    let Some(mut stepping) = drawn else { return Ok(()) };
    let sizes: Vec<u64> = scenario.table_specs().iter().map(TableSpec::elements).collect();
    let steps = stepping.policy.local(components.registry()).map_err(|error| error.to_string())?;
    if let Some(steps) = steps.filter(|steps| steps.deal(&sizes).is_ok()) {
        // An iteration takes about as long as in other worlds.
        stepping.compute.step_ms /= steps.h() as f64;
        *scenario = stepping;
    }
    Ok(())
}

/// Sometimes workers hold updates back, or begin to.
fn held(
    dice: &mut Dice,
    components: &Components<'_>,
    wanted: Wanted,
    registry: &Registry,
    scenario: &mut Scenario,
) -> Result<(), String> {
    if dice.chance(0.4) {
        let holding = scenario.clone().with(Axis::Hold, components.text(dice, Axis::Hold, wanted)?);
        if check(registry, &holding).is_ok() {
            *scenario = holding;
        }
    }
    if dice.chance(0.15) {
        let policies = Policies::of([(Axis::Hold, components.text(dice, Axis::Hold, wanted)?)]);
        let change = PolicyOverride::new(dice.pick(&["*", "fc*", "*1"]), policies);
        scenario.switches.push(Switch { at_s: dice.between(0.0, 2.0), change });
    }
    Ok(())
}

/// Sometimes what is broadcast is read.
fn readers(dice: &mut Dice, scenario: &mut Scenario) {
    let all_are_read = scenario.policy.is_broadcast() && !scenario.tables.iter().any(|table| table.rows);
    if all_are_read && dice.chance(0.5) {
        scenario.readers = dice.whole(1, 4) as u32;
    }
}

fn restarts(dice: &mut Dice, scenario: &Scenario, heal_at: Time) -> Vec<(NodeId, Time, Duration)> {
    let mut restarts = Vec::new();
    for id in 0..scenario.aggregators {
        if dice.chance(0.4) {
            restarts.push(restart(dice, NodeId::Aggregator(AggregatorId(id)), heal_at));
        }
    }
    restarts
}

fn restart(dice: &mut Dice, node: NodeId, heal_at: Time) -> (NodeId, Time, Duration) {
    let at = Time::from_secs_f64(dice.between(0.0, heal_at.as_secs_f64()));
    (node, at, Duration::from_secs_f64(dice.magnitude(1e-3, 2.0)))
}

/// Sometimes other processes go on in the place of shards, several times.
fn handovers(dice: &mut Dice, scenario: &Scenario, heal_at: Time) -> Vec<(ShardId, Time)> {
    let count = if dice.chance(0.3) { dice.whole(1, 4) } else { 0 };
    let handover = |_| {
        let server = ServerId(dice.whole(0, u64::from(scenario.servers) - 1) as u32);
        let core = dice.whole(0, u64::from(scenario.cores) - 1) as u32;
        (ShardId { server, core }, Time::from_secs_f64(dice.between(0.0, heal_at.as_secs_f64())))
    };
    (0..count).map(handover).collect()
}

/// Sometimes every shard has a copy, and servers die one after the other.
fn deaths(dice: &mut Dice, scenario: &mut Scenario, heal_at: Time) -> Vec<(ServerId, Time, Duration)> {
    if scenario.servers < 2 || !dice.chance(0.3) {
        return Vec::new();
    }
    scenario.replicas = 1;
    let count = dice.whole(1, 4);
    let death = |_| {
        let server = ServerId(dice.whole(0, u64::from(scenario.servers) - 1) as u32);
        let at = Time::from_secs_f64(dice.between(0.0, heal_at.as_secs_f64()));
        (server, at, Duration::from_secs_f64(dice.magnitude(1e-3, 2.0)))
    };
    (0..count).map(death).collect()
}

/// What is asked of the coordinator: servers are drained, and somebody looks at the status.
fn orders(dice: &mut Dice, scenario: &mut Scenario, heal_at: Time) {
    if scenario.servers > 1 && dice.chance(if scenario.replicas > 0 { 0.3 } else { 0.1 }) {
        let server = dice.whole(0, u64::from(scenario.servers) - 1) as u32;
        scenario.drains.push(Drain { at_s: dice.between(0.0, heal_at.as_secs_f64()), server });
    }
    // Reports fill connections that take a few hundred bytes at a time, and the job waits for them.
    if scenario.network.window_bytes >= 4096 && dice.chance(0.5) {
        scenario.status_every_s = dice.magnitude(0.01, 1.0);
    }
}

/// When further workers are started, as a job that runs takes them in.
fn joins(dice: &mut Dice, heal_at: Time) -> Vec<Time> {
    let count = if dice.chance(0.2) { dice.whole(1, 2) } else { 0 };
    let mut at = || Time::from_secs_f64(dice.between(0.0, heal_at.as_secs_f64()));
    (0..count).map(|_| at()).collect()
}

/// What goes wrong in a world.
struct Faults {
    /// In the words of scenarios.
    words: Vec<String>,
    /// Workers that may not finish.
    mortal: BTreeSet<WorkerId>,
    /// Workers that die and are started anew.
    reborn: BTreeSet<WorkerId>,
}

fn faults(dice: &mut Dice, scenario: &Scenario, heal_at: Time) -> Faults {
    let (mut faults, mut mortal, mut reborn) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    let worker = |dice: &mut Dice| dice.whole(0, u64::from(scenario.workers) - 1);
    let server = |dice: &mut Dice| dice.whole(0, u64::from(scenario.servers) - 1);
    let heal_ms = heal_at.as_secs_f64() * 1e3;
    if dice.chance(0.3) {
        faults.push(format!("worker={}:slow={:.2}x", worker(dice), dice.between(1.0, 4.0)));
    }
    if dice.chance(0.3) {
        faults.push(format!("server={}:slow={:.2}x", server(dice), dice.between(1.0, 20.0)));
    }
    if dice.chance(0.4) {
        faults.push(format!("link:reset,p={:.6}", dice.magnitude(1e-4, 5e-2)));
    }
    if dice.chance(0.2) {
        faults.push(format!("server={}:reset,p={:.6}", server(dice), dice.magnitude(1e-3, 0.2)));
    }
    if dice.chance(0.3) {
        let (by, p) = (dice.magnitude(1.0, 500.0), dice.magnitude(1e-3, 0.3));
        faults.push(format!("pull:delay={by:.3}ms,p={p:.6}"));
    }
    if dice.chance(0.3) {
        let (by, p) = (dice.magnitude(1.0, 500.0), dice.magnitude(1e-3, 0.3));
        faults.push(format!("push:delay={by:.3}ms,p={p:.6}"));
    }
    for _ in 0..dice.whole(0, 2) {
        let (length, at) = (dice.magnitude(1.0, 1500.0), dice.between(0.0, heal_ms));
        let node = if dice.chance(0.5) {
            format!("worker={}", worker(dice))
        } else {
            format!("server={}", server(dice))
        };
        faults.push(format!("{node}:pause={length:.3}ms@{at:.3}ms"));
    }
    if scenario.workers > 1 && dice.chance(0.15) {
        let dies = worker(dice);
        // At once, while its connections end, or after it was declared dead.
        let restart = format!(",restart={:.3}ms", dice.magnitude(1.0, 6000.0));
        let comes_back = dice.chance(0.6);
        let restart = if comes_back { restart } else { String::new() };
        faults.push(format!("worker={dies}:crash@{:.3}ms{restart}", dice.between(0.0, heal_ms)));
        if comes_back { &mut reborn } else { &mut mortal }.insert(WorkerId(dies as u32));
    } else if scenario.workers > 1 && dice.chance(0.05) {
        // So long that it is declared dead, and comes back as if nothing had happened.
        let sleeps = worker(dice);
        faults.push(format!("worker={sleeps}:pause=15s@{:.3}ms", dice.between(0.0, heal_ms)));
        mortal.insert(WorkerId(sleeps as u32));
    }
    Faults { words: faults, mortal, reborn }
}

/// The coordinator dies, and is started anew with what it has stored: at once, after a while, or so late that everybody who needs it waits. Not
/// so late that those give up who have never reached it.
fn coordinator(dice: &mut Dice, scenario: &mut Scenario, heal_at: Time) {
    if !dice.chance(0.25) {
        return;
    }
    let heal_ms = heal_at.as_secs_f64() * 1e3;
    for _ in 0..dice.whole(1, 3) {
        let (at, after) = (dice.between(0.0, heal_ms), dice.magnitude(1.0, 20_000.0));
        scenario.faults.push(format!("coordinator:crash@{at:.3}ms,restart={after:.3}ms"));
    }
}

fn partitions(dice: &mut Dice, scenario: &Scenario, heal_at: Time) -> Vec<(Vec<NodeId>, Time, Time)> {
    if !dice.chance(0.25) {
        return Vec::new();
    }
    let mut island = Vec::new();
    for worker in 0..scenario.workers {
        if dice.chance(0.3) {
            island.push(NodeId::Worker(WorkerId(worker)));
        }
    }
    for server in 0..scenario.servers {
        if dice.chance(0.3) {
            let shard = |core| NodeId::Shard(ShardId { server: ServerId(server), core });
            island.extend((0..scenario.cores).map(shard));
        }
    }
    let from = dice.between(0.0, heal_at.as_secs_f64());
    let until = from + dice.between(0.01, 1.0);
    vec![(island, Time::from_secs_f64(from), Time::from_secs_f64(until))]
}

fn aggregators(
    dice: &mut Dice,
    scenario: &mut Scenario,
    partitions: &mut [(Vec<NodeId>, Time, Time)],
    closures: &mut [(NodeId, Time, Time)],
) {
    if !dice.chance(0.4) {
        return;
    }
    scenario.aggregators = dice.whole(1, u64::from(scenario.workers.min(3))) as u32;
    scenario.hold_ms = if dice.chance(0.2) { 0.0 } else { dice.magnitude(0.1, 50.0) };
    for (island, ..) in partitions {
        let cut_off = (0..scenario.aggregators).filter(|_| dice.chance(0.4));
        island.extend(cut_off.map(|id| NodeId::Aggregator(AggregatorId(id))));
    }
    for (node, ..) in closures {
        if dice.chance(0.4) {
            *node = NodeId::Aggregator(AggregatorId(0));
        }
    }
}

fn aggregator_cores(dice: &mut Dice, scenario: &mut Scenario) {
    if scenario.aggregators > 0 && dice.chance(0.3) {
        scenario.aggregator_cores = dice.whole(2, 3) as u32;
    }
}

/// Sometimes aggregators stand above those of hosts. They are cut off and started anew like others.
fn rack_aggregators(
    dice: &mut Dice,
    scenario: &mut Scenario,
    heal_at: Time,
    partitions: &mut [(Vec<NodeId>, Time, Time)],
    closures: &mut [(NodeId, Time, Time)],
    restarts: &mut Vec<(NodeId, Time, Duration)>,
) {
    if scenario.aggregators == 0 || !dice.chance(0.3) {
        return;
    }
    scenario.rack_aggregators = dice.whole(1, u64::from(scenario.aggregators.min(2))) as u32;
    let racks = (scenario.aggregators..scenario.all_aggregators()).map(AggregatorId);
    let cores: Vec<NodeId> = racks.flat_map(|id| scenario.cores_of(id)).map(NodeId::Aggregator).collect();
    for (island, ..) in partitions {
        island.extend(cores.iter().filter(|_| dice.chance(0.4)));
    }
    for (node, ..) in closures {
        if dice.chance(0.3) {
            *node = cores[dice.below(cores.len())];
        }
    }
    if dice.chance(0.5) {
        let node = cores[dice.below(cores.len())];
        restarts.push(restart(dice, node, heal_at));
    }
}

fn slow_connections(dice: &mut Dice, scenario: &mut Scenario) {
    if !dice.chance(0.2) {
        return;
    }
    let whose = match dice.whole(0, 2) {
        0 => "link".to_owned(),
        1 => format!("worker={}", dice.whole(0, u64::from(scenario.workers) - 1)),
        _ => format!("server={}", dice.whole(0, u64::from(scenario.servers) - 1)),
    };
    let (by, p) = (dice.magnitude(0.1, 100.0), dice.magnitude(1e-3, 0.5));
    scenario.faults.push(format!("{whose}:delay={by:.3}ms,p={p:.6}"));
}

/// Frames wait at their senders only where windows are small, as tables are here.
fn windows(dice: &mut Dice, scenario: &mut Scenario) {
    if dice.chance(0.6) {
        scenario.network.window_bytes = dice.magnitude(64.0, 16384.0) as u64;
    }
    if dice.chance(0.3) {
        scenario.network.waiting_frames = dice.magnitude(1.0, 64.0) as u64;
    }
}

/// Racks and uplinks, background traffic while there are faults, and rates that fall and come back.
fn tiers(dice: &mut Dice, scenario: &mut Scenario, heal_at: Time) {
    if !dice.chance(0.25) {
        return;
    }
    let tiers = ThreeTier {
        hosts_per_edge: dice.whole(1, 6) as u32,
        edges_per_aggregation: dice.whole(1, 3) as u32,
        edge_oversubscription: dice.chance(0.6).then(|| dice.between(1.0, 8.0).round()),
        aggregation_oversubscription: dice.chance(0.3).then(|| dice.between(1.0, 4.0).round()),
        core_gbit_per_s: if dice.chance(0.2) { dice.magnitude(0.01, 10.0) } else { 0.0 },
        hop_us: if dice.chance(0.5) { dice.magnitude(0.1, 500.0) } else { 0.0 },
        fill: if dice.chance(0.5) { Fill::Spread } else { Fill::Packed },
        ..ThreeTier::default()
    };
    let Scenario { servers, workers, network, .. } = scenario;
    network.topology = Topology::ThreeTier(tiers);
    let heal_s = heal_at.as_secs_f64();
    let server = |dice: &mut Dice| format!("server={}", dice.whole(0, u64::from(*servers) - 1));
    for _ in 0..dice.whole(0, 2) {
        let from_s = dice.between(0.0, heal_s);
        let rate = dice.magnitude(1e-3, 0.1);
        // A greedy flow needs a limit, and what it takes costs events.
        let is_greedy = dice.chance(0.5) && (0.001..=0.1).contains(&network.gbit_per_s);
        network.background.push(BackgroundConfig {
            from: "edge=0".into(),
            to: server(dice),
            gbit_per_s: (!is_greedy).then_some(rate),
            flows: dice.whole(1, 3) as u32,
            from_s,
            until_s: Some(heal_s + 1e-3),
        });
    }
    let normal = if network.gbit_per_s == 0.0 { 10.0 } else { network.gbit_per_s };
    for _ in 0..dice.whole(0, 2) {
        let worker = dice.whole(0, u64::from(*workers) - 1);
        let link = match dice.whole(0, 2) {
            0 => server(dice),
            1 => format!("worker={worker}:up"),
            _ => "edge=*:down".into(),
        };
        let change = |at_s, gbit_per_s| RateChange { at_s, link: link.clone(), gbit_per_s };
        let at_s = dice.between(0.0, heal_s);
        network.changes.push(change(at_s, normal / dice.magnitude(1.0, 10.0)));
        network.changes.push(change(dice.between(at_s, heal_s), normal));
    }
}

/// The most seconds that a step of `workers` workers takes on the narrowest of shared links, if all its bytes cross that. The time
/// on links that are not shared is little, and part of every step's allowance.
fn crossing_s(scenario: &Scenario, workers: u32) -> f64 {
    let share = scenario.network.least_share_gbit_per_s();
    if scenario.network.topology == Topology::Star || share == 0.0 {
        return 0.0;
    }
    let elements: u64 = scenario.tables.iter().map(|table| table.shape.iter().product::<u64>()).sum();
    let frames = elements.div_ceil(scenario.policy.chunk_elements() as u64) + scenario.tables.len() as u64;
    let bytes = elements as f64 * 4.0 * scenario.network.wire_scale + 256.0 * frames as f64;
    2.0 * f64::from(workers) * bytes * 8.0 / (share * 1e9)
}

/// The most seconds that a step of `workers` workers waits for room in the windows of connections: a window is empty again after
/// a round trip, and those behind an aggregator share its connection to a shard.
fn passage_s(scenario: &Scenario, workers: u32) -> f64 {
    let NetworkConfig { jitter_us, window_bytes, .. } = scenario.network;
    let latency_us = scenario.network.longest_latency_us();
    let round_trip_s = 2e-6 * (latency_us + 4.0 * jitter_us);
    let chunk = scenario.policy.chunk_elements() as u64;
    let frames = scenario.tables.iter().map(|table| table.shape.iter().product::<u64>().div_ceil(chunk));
    let frames: u64 = frames.sum();
    let frames_at_once = (window_bytes / (4 * chunk)).max(1);
    let sharing = if scenario.aggregators > 0 { workers } else { 1 };
    // There and back.
    2.0 * round_trip_s * (frames.div_ceil(frames_at_once) as f64) * f64::from(sharing)
}

fn closures(dice: &mut Dice, scenario: &Scenario, heal_at: Time) -> Vec<(NodeId, Time, Time)> {
    if !dice.chance(0.15) {
        return Vec::new();
    }
    let server = ServerId(dice.whole(0, u64::from(scenario.servers) - 1) as u32);
    let core = dice.whole(0, u64::from(scenario.cores) - 1) as u32;
    let shard = NodeId::Shard(ShardId { server, core });
    let node = if dice.chance(0.7) { shard } else { NodeId::Coordinator };
    let from = dice.between(0.0, heal_at.as_secs_f64());
    vec![(node, Time::from_secs_f64(from), Time::from_secs_f64(from + dice.between(0.01, 1.0)))]
}
