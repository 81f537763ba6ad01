//! What a seed means.

use crate::canary::Canary;
use crate::cluster::{Cluster, Play};
use crate::compute::ComputeModel;
use crate::gradient::Gradients;
use crate::network::NetworkConfig;
use crate::rules::{Closed, Partition};
use crate::scenario::{Scenario, ScenarioError, Switch, TableConfig};
use paramill_core::policy::{Axis, Order, Policies, Policy, PolicyOverride};
use paramill_core::prng::Prng;
use paramill_core::table::glob_matches;
use paramill_core::types::{AggregatorId, NodeId, ServerId, ShardId, Time, WorkerId};
use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

/// A world that was drawn from a seed.
#[derive(Debug, Clone)]
pub struct Drawn {
    /// The job, the network and the faults.
    pub scenario: Scenario,
    /// What workers push.
    pub gradients: Gradients,
    /// Nodes that are cut off, and when.
    pub partitions: Vec<(Vec<NodeId>, Time, Time)>,
    /// Nodes that take no new connections, and when.
    pub closures: Vec<(NodeId, Time, Time)>,
    /// Workers that may not finish.
    pub mortal: BTreeSet<WorkerId>,
    /// When all faults end.
    pub heal_at: Time,
    /// When everybody must have finished.
    pub deadline: Time,
}

/// What a world begins with; partial pulling and its scaling are drawn apart, where nothing is counted.
const COUNTED_MODELS: [&str; 9] = [
    "bsp",
    "asp",
    "ssp:s=1",
    "ssp:s=3",
    "dsps:min=1,max=4",
    "drop:n=2",
    "pssp:s=1,c=0.5",
    "pssp:s=2,alpha=0.8",
    "progress < v_train + 2 || rand() > 0.5",
];
const OTHER_MODELS: [&str; 4] =
    ["psp:c=2,b=0.5", "psp:c=1,b=0.9,tau1=5ms,tau2=5ms", "bsp", "pssp:s=2,alpha=significance"];
const OPTIMIZERS: [&str; 6] =
    ["sgd:lr=0.05", "momentum:lr=0.02", "adagrad:lr=0.1", "adam:lr=0.01", "adamw:lr=0.01", "lars:lr=0.1"];
const PLACEMENTS: [&str; 4] = ["uniform", "round_robin", "greedy", "heuristic"];

impl Drawn {
    /// The world of a seed.
    pub fn new(seed: u64) -> Drawn {
        let mut dice = Dice(Prng::fork(seed, 0x7377_6172));
        let mut scenario = dice.job(seed);
        let tagged = dice.chance(0.7);
        let gradients = if tagged {
            scenario = scenario.with(Axis::Optimizer, "sgd:lr=1").with(Axis::Reduce, "sum");
            Gradients::Tagged { workers: scenario.workers }
        } else {
            scenario = scenario.with(Axis::Optimizer, dice.pick(&OPTIMIZERS));
            Gradients::Quadratic
        };
        dice.models(&mut scenario, tagged);
        // Faults are for the time that the job takes, more or less.
        let expected_s = scenario.iterations as f64 * scenario.compute.step_ms * 2e-3;
        let heal_at = Time::from_secs_f64(0.1 + expected_s * dice.between(0.2, 2.0));
        let (faults, mortal) = dice.faults(&scenario, heal_at);
        scenario.faults = faults;
        let partitions = dice.partitions(&scenario, heal_at);
        let closures = dice.closures(&scenario, heal_at);
        let (mut partitions, mut closures) = (partitions, closures);
        // Drawn apart, so that a world is the same but for what stands between its workers and its servers.
        let mut dice = Dice(Prng::fork(seed, 0x6167_6772));
        dice.aggregators(&mut scenario, &mut partitions, &mut closures);
        // So are slow connections, which late answers have to be whole on.
        let mut dice = Dice(Prng::fork(seed, 0x736c_6f77));
        dice.slow_connections(&mut scenario);
        let mut dice = Dice(Prng::fork(seed, 0x7769_6e64));
        dice.windows(&mut scenario);
        let slowest_step = scenario.compute.step_ms * 1e-3 * (1.0 + 8.0 * scenario.compute.jitter) * 4.0;
        let budget = 120.0 + scenario.iterations as f64 * (4.0 * slowest_step + 0.2);
        let deadline = heal_at + Duration::from_secs_f64(budget);
        Drawn { scenario, gradients, partitions, closures, mortal, heal_at, deadline }
    }

    /// The world, set up.
    pub fn cluster(&self, canary: Option<Canary>) -> Result<Cluster, ScenarioError> {
        let mut cluster = Cluster::with(&self.scenario, self.play(canary))?;
        for (island, from, until) in &self.partitions {
            cluster.world.rules().add(Partition::new(island.clone(), *from, *until));
        }
        for (node, from, until) in &self.closures {
            cluster.world.rules().add(Closed::new(*node, *from, *until));
        }
        Ok(cluster)
    }

    fn play(&self, canary: Option<Canary>) -> Play {
        // Blocks that come late change what is read, where tables are pulled partially.
        let watches_memory = !self.models().any(|sync| sync.starts_with("psp"));
        Play { gradients: self.gradients, canary, watches_memory, ..Play::default() }
    }

    /// Every consistency model of the job.
    fn models(&self) -> impl Iterator<Item = &str> {
        let Scenario { policy, overrides, switches, .. } = &self.scenario;
        let rules = overrides.iter().chain(switches.iter().map(|switch| &switch.change));
        rules.filter_map(|rule| rule.policies.get(Axis::Sync)).chain([policy.get(Axis::Sync)])
    }

    /// Whether the job must end with the same bits with and without faults.
    pub fn has_calm_twin(&self) -> bool {
        let Scenario { policy, overrides, switches, .. } = &self.scenario;
        let synchronous =
            policy.get(Axis::Sync).starts_with("bsp") && overrides.is_empty() && switches.is_empty();
        synchronous
            && policy.order() == Order::Ranked
            && self.mortal.is_empty()
            && self.gradients == Gradients::Quadratic
    }

    /// The same job without faults, and with nothing between workers and servers.
    pub fn calm(&self) -> Scenario {
        Scenario { faults: Vec::new(), aggregators: 0, ..self.scenario.clone() }
    }
}

impl fmt::Display for Drawn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Scenario { workers, servers, cores, iterations, policy, .. } = &self.scenario;
        write!(f, "{workers} workers, {servers} servers of {cores} cores, ")?;
        if self.scenario.aggregators > 0 {
            let Scenario { aggregators, hold_ms, .. } = &self.scenario;
            write!(f, "{aggregators} aggregators that hold for {hold_ms:.2} ms, ")?;
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
        for (node, from, until) in &self.closures {
            let (from, until) = (from.as_secs_f64(), until.as_secs_f64());
            write!(f, "; {node} takes no connections from {from:.2} to {until:.2} s")?;
        }
        write!(f, "; healed at {:.2} s", self.heal_at.as_secs_f64())
    }
}

struct Dice(Prng);

impl Dice {
    fn chance(&mut self, p: f64) -> bool {
        self.0.chance(p)
    }

    /// A whole number from `low` to `high`, both included.
    fn whole(&mut self, low: u64, high: u64) -> u64 {
        low + self.0.below(high - low + 1)
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.0.uniform()
    }

    /// Uniform in the logarithm: small values as often as large ones.
    fn magnitude(&mut self, low: f64, high: f64) -> f64 {
        (self.between(low.ln(), high.ln())).exp()
    }

    fn pick<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[self.0.below(choices.len() as u64) as usize]
    }

    fn job(&mut self, seed: u64) -> Scenario {
        let tables = (0..self.whole(1, 3)).map(|number| self.table(number)).collect();
        let latency_us = self.magnitude(10.0, 5e3);
        let network = NetworkConfig {
            latency_us,
            jitter_us: if self.chance(0.7) { self.between(0.0, 2.0) * latency_us } else { 0.0 },
            gbit_per_s: [0.0, 0.01, 0.1, 1.0, 10.0][self.whole(0, 4) as usize],
            wire_scale: self.magnitude(1.0, 20.0),
            handling_us: self.magnitude(0.1, 100.0),
            ..NetworkConfig::default()
        };
        let compute = ComputeModel {
            step_ms: self.magnitude(0.5, 50.0),
            jitter: self.between(0.0, 1.0),
            straggle_p: if self.chance(0.3) { self.between(0.0, 0.1) } else { 0.0 },
            straggle_factor: self.between(1.0, 10.0),
        };
        Scenario {
            seed,
            workers: self.whole(1, 8) as u32,
            servers: self.whole(1, 4) as u32,
            cores: self.whole(1, 2) as u32,
            iterations: self.whole(3, 60),
            policy: Policy::default()
                .with(Axis::Placement, self.pick(&PLACEMENTS))
                .with(Axis::Order, if self.chance(0.5) { "ranked" } else { "arrival" })
                .with(Axis::Chunk, format!("{}B", 4 * self.whole(6, 64))),
            colocated: self.chance(0.3),
            tables,
            network,
            compute,
            ..Scenario::default()
        }
    }

    fn table(&mut self, number: u64) -> TableConfig {
        let name = format!("{}{number}", self.pick(&["conv", "fc", "emb"]));
        if self.chance(0.3) {
            return TableConfig { name, shape: vec![self.whole(1, 60), self.whole(1, 6)], rows: true };
        }
        TableConfig { name, shape: vec![self.magnitude(1.0, 500.0) as u64], rows: false }
    }

    fn models(&mut self, scenario: &mut Scenario, tagged: bool) {
        let has_dense = scenario.tables.iter().any(|table| !table.rows);
        let mut model = || {
            let name = if tagged { self.pick(&COUNTED_MODELS) } else { self.pick(&OTHER_MODELS) };
            // Partial pulling is of dense tables, and refused where there are none.
            let whole = name.split(",b=").next().unwrap_or(name);
            let name = if has_dense { name } else { whole };
            // A bare condition takes no parameters.
            let takes_exec = !name.contains(' ') && self.chance(0.3);
            match (takes_exec, name.contains(':')) {
                (false, _) => name.to_owned(),
                (true, true) => format!("{name},exec=soft"),
                (true, false) => format!("{name}:exec=soft"),
            }
        };
        let first = model();
        let (another, a_third, a_fourth) = (model(), model(), model());
        let partial = |sync: &str| sync.starts_with("psp:");
        if self.chance(0.1) {
            // The baseline without overlap has one scheduler, and so one model.
            scenario.policy = scenario.policy.clone().with(Axis::Sync, "bsp:overlap=false");
            return;
        }
        scenario.policy = scenario.policy.clone().with(Axis::Sync, first.as_str());
        // Workers take partial pulling from the plan, where it holds for a table on all servers alike.
        if self.chance(0.2) {
            let server = (!partial(&another) && !partial(&first) && self.chance(0.5))
                .then(|| ServerId(self.whole(0, u64::from(scenario.servers) - 1) as u32));
            let table = self.pick(&["*0", "conv*", "*"]).to_owned();
            // An exception that no table matches would be refused.
            if scenario.tables.iter().any(|known| glob_matches(&table, &known.name)) {
                scenario
                    .overrides
                    .push(PolicyOverride::new(table, Policies::of([(Axis::Sync, another)])).on(server));
            }
        }
        for sync in [a_third, a_fourth] {
            if self.chance(0.3) {
                let at_s = self.between(0.0, 2.0);
                let table = self.pick(&["*", "*", "fc*", "*1"]).to_owned();
                let change = PolicyOverride::new(table, Policies::of([(Axis::Sync, sync)]));
                scenario.switches.push(Switch { at_s, change });
            }
        }
    }

    fn faults(&mut self, scenario: &Scenario, heal_at: Time) -> (Vec<String>, BTreeSet<WorkerId>) {
        let (mut faults, mut mortal) = (Vec::new(), BTreeSet::new());
        let worker = |dice: &mut Dice| dice.whole(0, u64::from(scenario.workers) - 1);
        let server = |dice: &mut Dice| dice.whole(0, u64::from(scenario.servers) - 1);
        let heal_ms = heal_at.as_secs_f64() * 1e3;
        if self.chance(0.3) {
            faults.push(format!("worker={}:slow={:.2}x", worker(self), self.between(1.0, 4.0)));
        }
        if self.chance(0.3) {
            faults.push(format!("server={}:slow={:.2}x", server(self), self.between(1.0, 20.0)));
        }
        if self.chance(0.4) {
            faults.push(format!("link:reset,p={:.6}", self.magnitude(1e-4, 5e-2)));
        }
        if self.chance(0.2) {
            faults.push(format!("server={}:reset,p={:.6}", server(self), self.magnitude(1e-3, 0.2)));
        }
        if self.chance(0.3) {
            let (by, p) = (self.magnitude(1.0, 500.0), self.magnitude(1e-3, 0.3));
            faults.push(format!("pull:delay={by:.3}ms,p={p:.6}"));
        }
        if self.chance(0.3) {
            let (by, p) = (self.magnitude(1.0, 500.0), self.magnitude(1e-3, 0.3));
            faults.push(format!("push:delay={by:.3}ms,p={p:.6}"));
        }
        for _ in 0..self.whole(0, 2) {
            let (length, at) = (self.magnitude(1.0, 1500.0), self.between(0.0, heal_ms));
            let node = if self.chance(0.5) {
                format!("worker={}", worker(self))
            } else {
                format!("server={}", server(self))
            };
            faults.push(format!("{node}:pause={length:.3}ms@{at:.3}ms"));
        }
        if scenario.workers > 1 && self.chance(0.15) {
            let dies = worker(self);
            faults.push(format!("worker={dies}:crash@{:.3}ms", self.between(0.0, heal_ms)));
            mortal.insert(WorkerId(dies as u32));
        } else if scenario.workers > 1 && self.chance(0.05) {
            // So long that it is declared dead, and comes back as if nothing had happened.
            let sleeps = worker(self);
            faults.push(format!("worker={sleeps}:pause=15s@{:.3}ms", self.between(0.0, heal_ms)));
            mortal.insert(WorkerId(sleeps as u32));
        }
        (faults, mortal)
    }

    fn partitions(&mut self, scenario: &Scenario, heal_at: Time) -> Vec<(Vec<NodeId>, Time, Time)> {
        if !self.chance(0.25) {
            return Vec::new();
        }
        let mut island = Vec::new();
        for worker in 0..scenario.workers {
            if self.chance(0.3) {
                island.push(NodeId::Worker(WorkerId(worker)));
            }
        }
        for server in 0..scenario.servers {
            if self.chance(0.3) {
                let shard = |core| NodeId::Shard(ShardId { server: ServerId(server), core });
                island.extend((0..scenario.cores).map(shard));
            }
        }
        let from = self.between(0.0, heal_at.as_secs_f64());
        let until = from + self.between(0.01, 1.0);
        vec![(island, Time::from_secs_f64(from), Time::from_secs_f64(until))]
    }

    fn aggregators(
        &mut self,
        scenario: &mut Scenario,
        partitions: &mut [(Vec<NodeId>, Time, Time)],
        closures: &mut [(NodeId, Time, Time)],
    ) {
        if !self.chance(0.4) {
            return;
        }
        scenario.aggregators = self.whole(1, u64::from(scenario.workers.min(3))) as u32;
        scenario.hold_ms = if self.chance(0.2) { 0.0 } else { self.magnitude(0.1, 50.0) };
        for (island, ..) in partitions {
            let cut_off = (0..scenario.aggregators).filter(|_| self.chance(0.4));
            island.extend(cut_off.map(|id| NodeId::Aggregator(AggregatorId(id))));
        }
        for (node, ..) in closures {
            if self.chance(0.4) {
                *node = NodeId::Aggregator(AggregatorId(0));
            }
        }
    }

    fn slow_connections(&mut self, scenario: &mut Scenario) {
        if !self.chance(0.2) {
            return;
        }
        let whose = match self.whole(0, 2) {
            0 => "link".to_owned(),
            1 => format!("worker={}", self.whole(0, u64::from(scenario.workers) - 1)),
            _ => format!("server={}", self.whole(0, u64::from(scenario.servers) - 1)),
        };
        let (by, p) = (self.magnitude(0.1, 100.0), self.magnitude(1e-3, 0.5));
        scenario.faults.push(format!("{whose}:delay={by:.3}ms,p={p:.6}"));
    }

    /// Frames wait at their senders only where windows are small, as tables are here.
    fn windows(&mut self, scenario: &mut Scenario) {
        if self.chance(0.6) {
            scenario.network.window_bytes = self.magnitude(64.0, 16384.0) as u64;
        }
        if self.chance(0.3) {
            scenario.network.waiting_frames = self.magnitude(1.0, 64.0) as u64;
        }
    }

    fn closures(&mut self, scenario: &Scenario, heal_at: Time) -> Vec<(NodeId, Time, Time)> {
        if !self.chance(0.15) {
            return Vec::new();
        }
        let server = ServerId(self.whole(0, u64::from(scenario.servers) - 1) as u32);
        let core = self.whole(0, u64::from(scenario.cores) - 1) as u32;
        let shard = NodeId::Shard(ShardId { server, core });
        let node = if self.chance(0.7) { shard } else { NodeId::Coordinator };
        let from = self.between(0.0, heal_at.as_secs_f64());
        vec![(node, Time::from_secs_f64(from), Time::from_secs_f64(from + self.between(0.01, 1.0)))]
    }
}
