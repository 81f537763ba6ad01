//! Notices that a job cannot go on, so that a run has an end and says who waits for what.
//!
//! A job may wait long and legally: for a computation, for a pause or a crash that is planned, for a slow network. Progress
//! is therefore what workers get done, and patience grows with what the scenario makes slow.

use crate::actor::Actor;
use crate::cluster::Cluster;
use crate::player::Progress;
use crate::scenario::Scenario;
use crate::world::Observer;
use paramill_core::fault::{Effect, FaultPlan};
use paramill_core::table::{TableSpec, chunks_at_most};
use paramill_core::types::{NodeId, ServerId, ShardId, Time, WorkerId};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long any job may go without progress, in seconds. A dead worker is noticed within 10 s, a lost server within 30 s.
const PATIENCE_S: f64 = 600.0;
/// Turns of nodes that any job may take without progress. Connections that break and are made again take many in a short
/// time.
const PATIENCE_TURNS: f64 = 2e6;
/// Heartbeats and reports of a node, in turns per second, with room to spare.
const IDLE_TURNS_PER_S: f64 = 20.0;
/// Workers that are named.
const NAMED: usize = 3;

/// Ends a run in which no worker gets anything done any more.
#[derive(Debug)]
pub(crate) struct StallWatch {
    patience: Duration,
    most_turns: u64,
    /// The last fault or switch that the scenario plans: it may be what everybody waits for.
    planned_until: Time,
    progress: BTreeMap<WorkerId, Progress>,
    /// When a worker last got something done, or will have computed what it computes now.
    since: Time,
    /// Turns of all nodes after that.
    turns: u64,
}

impl StallWatch {
    pub(crate) fn new(scenario: &Scenario, faults: &FaultPlan) -> StallWatch {
        let patience_s = patience_s(scenario, faults);
        let aggregators = scenario.all_aggregators() * scenario.aggregator_cores;
        let nodes = scenario.workers + scenario.servers * scenario.cores + aggregators + scenario.readers + 1;
        let idle = f64::from(nodes) * patience_s * IDLE_TURNS_PER_S;
        StallWatch {
            patience: Duration::from_secs_f64(patience_s),
            most_turns: (PATIENCE_TURNS + idle + 100.0 * frames_of_a_round(scenario)) as u64,
            planned_until: planned_until(scenario, faults),
            progress: BTreeMap::new(),
            since: Time::ZERO,
            turns: 0,
        }
    }
}

impl Observer<Actor> for StallWatch {
    fn on_settled(&mut self, now: Time, node: NodeId, role: &Actor) -> Result<(), String> {
        if let (NodeId::Worker(worker), Some(player)) = (node, role.as_player()) {
            let progress = player.progress();
            if self.progress.insert(worker, progress) != Some(progress) {
                self.since = self.since.max(player.computes_until().unwrap_or(now));
                self.turns = 0;
            }
        }
        let since = self.since.max(self.planned_until);
        if now <= since {
            self.turns = 0;
            return Ok(());
        }
        self.turns += 1;
        if now > since + self.patience {
            let seconds = now.since(since).as_secs_f64();
            return Err(format!("no worker made progress for {seconds:.0} s of virtual time"));
        }
        if self.turns > self.most_turns {
            return Err(format!("no worker made progress in {} events", self.turns));
        }
        Ok(())
    }
}

/// Who waits for what, as a sentence.
pub(crate) fn who_waits(cluster: &Cluster) -> String {
    let now = cluster.world.now();
    let lives = |worker: &WorkerId| cluster.world.ended(NodeId::Worker(*worker)).is_none();
    let waiting: Vec<WorkerId> = cluster.worker_ids().filter(lives).collect();
    let named = waiting.iter().take(NAMED).map(|&worker| {
        let player = cluster.player(worker);
        match player.is_waiting() {
            true => format!("{worker} waits for {}", player.doing(now)),
            false => format!("{worker} {}", player.doing(now)),
        }
    });
    let mut sentences: Vec<String> = named.collect();
    match waiting.len() {
        0 => sentences.push("no worker is left, and the coordinator has not ended the job".into()),
        count if count > NAMED => sentences.push(format!("and so do {} more workers", count - NAMED)),
        _ => {}
    }
    sentences.join("; ")
}

/// How long no worker may get anything done, in seconds: more where the network, the servers or delays are slow.
fn patience_s(scenario: &Scenario, faults: &FaultPlan) -> f64 {
    let network = &scenario.network;
    let frames = frames_of_a_round(scenario);
    let elements: u64 = scenario.table_specs().iter().map(|table| table.elements()).sum();
    let bytes =
        2.0 * f64::from(scenario.workers) * elements as f64 * 4.0 * network.wire_scale + frames * 64.0;
    let share = network.least_share_gbit_per_s();
    let on_links = if share == 0.0 { 0.0 } else { bytes * 8.0 / (share * 1e9) };
    let slowdown = |server| faults.slowdown(NodeId::Shard(ShardId { server: ServerId(server), core: 0 }));
    let slowest = (0..scenario.servers).map(slowdown).fold(1.0, f64::max);
    let handled = frames * network.handling_us * 1e-6 * slowest;
    let delays = faults.rules().iter().map(|rule| match rule.effect {
        Effect::Delay { by, .. } => by.as_secs_f64(),
        _ => 0.0,
    });
    let one_way = (network.longest_latency_us() + network.jitter_us) * 1e-6 + delays.sum::<f64>();
    let patience = PATIENCE_S + 10.0 * (on_links + handled) + 100.0 * (one_way + scenario.hold_ms * 1e-3);
    patience.min(scenario.limit_s)
}

/// Frames of gradients and parameters in an iteration of all workers.
fn frames_of_a_round(scenario: &Scenario) -> f64 {
    let chunks = |table: &TableSpec| 1 + chunks_at_most(table, &[], &scenario.policy);
    let chunks: u64 = scenario.table_specs().iter().map(chunks).sum();
    2.0 * f64::from(scenario.workers) * chunks as f64
}

fn planned_until(scenario: &Scenario, faults: &FaultPlan) -> Time {
    let faults = faults.rules().iter().filter_map(|rule| match rule.effect {
        Effect::Pause { length, at } => Some(at + length),
        Effect::Crash { at, restart } => Some(at + restart.unwrap_or_default()),
        _ => None,
    });
    let switches = scenario.switches.iter().map(|switch| Time::from_secs_f64(switch.at_s));
    faults.chain(switches).max().unwrap_or(Time::ZERO)
}

#[cfg(test)]
mod tests {
    use crate::compute::ComputeModel;
    use crate::report::{Report, run_scenario};
    use crate::scenario::Scenario;
    use paramill_core::policy::Axis;

    fn run(faults: &[&str], scenario: Scenario) -> Report {
        let faults = faults.iter().map(|fault| fault.to_string()).collect();
        run_scenario(&Scenario { faults, ..scenario }).unwrap()
    }

    #[test]
    fn a_job_whose_connections_all_break_ends_and_says_who_waits_for_what() {
        let report = run(&["link:reset"], Scenario::new(5, 2, 100));
        let why = report.stalled.unwrap();
        assert!(!report.finished, "{why}");
        assert!(why.starts_with("no worker made progress for "), "{why}");
        assert!(why.contains("worker 0 waits for the job to start"), "{why}");
        assert!(why.contains("and so do 2 more workers"), "{why}");
    }

    #[test]
    fn a_job_in_which_no_answer_ever_gets_through_whole_ends_too() {
        let scenario = Scenario::new(2, 1, 4000).with(Axis::Chunk, "32B");
        let report = run(&["pull:reset,p=0.1"], scenario);
        let why = report.stalled.unwrap();
        assert!(why.contains("worker 0 waits for "), "{why}");
        assert!(why.contains("server 0 core 0"), "{why}");
    }

    #[test]
    fn long_computations_pauses_and_delays_are_no_stall() {
        let base = Scenario { iterations: 2, ..Scenario::new(2, 1, 1000) };
        let compute = ComputeModel { step_ms: 5e6, ..Default::default() };
        for (faults, scenario) in [
            (&[][..], Scenario { compute, ..base.clone() }),
            (&["server=0:pause=5000s@20ms"], base.clone()),
            (&["pull:delay=3000s"], base),
        ] {
            let report = run(faults, scenario);
            assert!(report.finished && report.seconds > 2e3, "{report:?}");
        }
    }
}
