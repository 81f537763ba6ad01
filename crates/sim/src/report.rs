//! What came out of a run.

use crate::cluster::Cluster;
use crate::network::Traffic;
use crate::scenario::{Scenario, ScenarioError};
use crate::stall::{StallWatch, who_waits};
use crate::world::Violation;
use paramill_core::consistency::SyncStats;
use paramill_core::status::{ReadsReport, UpdatesReport};
use paramill_core::types::{NodeId, ServerId, ShardId, TableId, Time, WorkerId};
use paramill_core::waits::Waited;
use serde::Serialize;
use std::cmp::Reverse;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// What came out of a run, for people and for programs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The seed that gives the same run again.
    pub seed: u64,
    /// Whether every worker did all its iterations.
    pub finished: bool,
    /// Why the run was given up, when nothing could go on: who waits for what.
    pub stalled: Option<String>,
    /// Virtual time from the job's start to the last worker's last iteration, in seconds.
    pub seconds: f64,
    /// Iterations that all workers did together.
    pub iterations: u64,
    /// What was trained.
    pub tables: Vec<TableOutcome>,
    /// How every worker fared.
    pub workers: Vec<WorkerOutcome>,
    /// How long all workers waited together, and for whom: for parameters, at the start and when they left.
    pub waited: Waited,
    /// Counters of all consistency controllers together.
    pub sync: SyncStats,
    /// Rounds that an answer lacked on average.
    pub mean_staleness: f64,
    /// How all workers together got the parameters that they computed on.
    pub reads: ReadsReport,
    /// What became of all workers' updates, where the policy `hold` is used.
    pub updates: Option<UpdatesReport>,
    /// How busy the servers' links were while the job ran.
    pub links: Vec<LinkOutcome>,
    /// How hosts hang together, with every rate.
    pub network: String,
    /// What went over each link that was used, the busiest first.
    pub traffic: Vec<LinkTraffic>,
    /// Payload bytes of gradients that servers received.
    pub bytes_pushed: u64,
    /// Payload bytes of parameters that servers sent.
    pub bytes_pulled: u64,
    /// Frames sent.
    pub frames: u64,
    /// Events of the simulation.
    pub events: u64,
    /// The last lines that nodes logged, when the run did not finish.
    pub log: Vec<String>,
}

/// A table after the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TableOutcome {
    /// Its name.
    pub name: String,
    /// [`parameter_hash`] of its values.
    pub hash: String,
}

/// A worker after the run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorkerOutcome {
    /// Its rank.
    pub worker: WorkerId,
    /// Iterations done.
    pub iterations: u64,
    /// When its last iteration was over, in seconds of virtual time.
    pub finished_s: Option<f64>,
    /// Time spent computing.
    pub computed_s: f64,
    /// Time spent waiting for parameters.
    pub waited_s: f64,
    /// How it got the parameters that it computed on.
    pub reads: ReadsReport,
    /// What it was doing when the run ended, or why it failed.
    pub doing: String,
}

/// A server's link after the run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LinkOutcome {
    /// Whose link.
    pub server: ServerId,
    /// Fraction of the time that it was receiving.
    pub load_in: f64,
    /// Fraction of the time that it was sending.
    pub load_out: f64,
}

/// One direction of a link after the run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LinkTraffic {
    /// Its name in the words of a scenario: `server=0:up`, `edge=2:down`.
    pub link: String,
    /// Bytes that went over it, as scaled by the scenario.
    pub bytes: u64,
    /// Time that they took.
    pub busy_s: f64,
    /// Fraction of all virtual time that it was busy.
    pub load: f64,
}

/// Runs a scenario to its end, to its limit of virtual time, or until no worker makes progress any more.
pub fn run_scenario(scenario: &Scenario) -> Result<Report, ScenarioError> {
    let mut cluster = Cluster::new(scenario)?;
    let until = Time::from_secs_f64(scenario.limit_s);
    let mut watch = StallWatch::new(scenario, &scenario.fault_plan()?);
    let ran = cluster.run(until, &mut watch);
    let report = Report::of(&cluster);
    let stalled = ran.err().map(|Violation { what, .. }| format!("{what}: {}", who_waits(&cluster)));
    Ok(Report { stalled, ..report })
}

/// Runs several scenarios, as many at a time as there are processors; reports come in the order of the scenarios.
pub fn run_scenarios(scenarios: &[Scenario]) -> Result<Vec<Report>, ScenarioError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(scenarios.len().max(1));
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((index, scenario)) =
            scenarios.iter().enumerate().nth(next.fetch_add(1, Ordering::Relaxed))
        {
            done.push((index, run_scenario(scenario)));
        }
        done
    };
    let mut reports: Vec<_> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        handles.into_iter().flat_map(|handle| handle.join().expect("a simulation does not panic")).collect()
    });
    reports.sort_by_key(|(index, _)| *index);
    reports.into_iter().map(|(_, report)| report).collect()
}

/// A digest of parameters, bit by bit: two runs agree when it is the same.
pub fn parameter_hash(values: &[f32]) -> String {
    let mut hasher = xxhash_rust::xxh3::Xxh3::new();
    values.iter().for_each(|value| hasher.update(&value.to_le_bytes()));
    format!("{:016x}", hasher.digest())
}

impl Report {
    /// How a cluster stands.
    pub fn of(cluster: &Cluster) -> Report {
        let (now, scenario) = (cluster.world.now(), cluster.scenario());
        let players: Vec<_> = cluster.worker_ids().map(|id| (id, cluster.player(id))).collect();
        let times = || players.iter().map(|(_, player)| player.times());
        let started = times().filter_map(|times| times.started).min().unwrap_or(now);
        let ended = times().map(|times| times.finished.unwrap_or(now)).max().unwrap_or(now);
        let seconds = ended.since(started).as_secs_f64();
        let shards: Vec<_> = cluster.shard_ids().filter_map(|id| cluster.shard(id).report(now)).collect();
        let mut sync = SyncStats::default();
        shards.iter().flat_map(|shard| &shard.tables).for_each(|table| sync.merge(&table.stats));
        let load = |busy: Duration| busy.as_secs_f64() / seconds.max(f64::MIN_POSITIVE);
        let link = |server: ServerId| {
            let host = cluster.hosts().host(NodeId::Shard(ShardId { server, core: 0 }));
            let used = cluster.world.network().usage(host);
            LinkOutcome { server, load_in: load(used.busy_in), load_out: load(used.busy_out) }
        };
        let finished = players.iter().all(|(_, player)| player.is_finished());
        let tables = (0..).zip(&scenario.tables).map(|(number, table)| TableOutcome {
            name: table.name.clone(),
            hash: parameter_hash(&cluster.parameters(TableId(number))),
        });
        let waited: Vec<Waited> = players.iter().map(|(_, player)| player.worker().report().waited).collect();
        Report {
            seed: scenario.seed,
            finished,
            stalled: None,
            seconds,
            iterations: players.iter().map(|(_, player)| player.clock()).sum(),
            tables: tables.collect(),
            workers: players
                .iter()
                .map(|(worker, player)| WorkerOutcome {
                    worker: *worker,
                    iterations: player.clock(),
                    finished_s: player.times().finished.map(Time::as_secs_f64),
                    computed_s: player.times().computed.as_secs_f64(),
                    waited_s: player.times().waited.as_secs_f64(),
                    reads: player.worker().report().reads,
                    doing: player.doing(now),
                })
                .collect(),
            waited: Waited::sum(&waited),
            mean_staleness: sync.mean_staleness(),
            reads: players
                .iter()
                .map(|(_, player)| player.worker().report().reads)
                .fold(ReadsReport::default(), ReadsReport::beside),
            updates: UpdatesReport::sum(players.iter().map(|(_, player)| player.worker().report().updates)),
            sync,
            links: (0..scenario.servers).map(ServerId).map(link).collect(),
            network: cluster.hosts().describe(&scenario.network),
            traffic: traffic(cluster),
            bytes_pushed: shards.iter().map(|shard| shard.bytes_pushed).sum(),
            bytes_pulled: shards.iter().map(|shard| shard.bytes_pulled).sum(),
            frames: cluster.world.counts().frames,
            events: cluster.world.counts().events,
            log: if finished { Vec::new() } else { cluster.world.log().map(str::to_owned).collect() },
        }
    }

    /// The busiest direction of any server's link, as a fraction of the time.
    pub fn link_load(&self) -> f64 {
        self.links.iter().map(|link| link.load_in.max(link.load_out)).fold(0.0, f64::max)
    }
}

/// What went over each link that was used, the busiest first.
fn traffic(cluster: &Cluster) -> Vec<LinkTraffic> {
    let seconds = cluster.world.now().as_secs_f64();
    let names = cluster.hosts().link_names();
    let mut used = cluster.world.network().traffic();
    used.retain(|traffic| traffic.bytes > 0);
    used.sort_by_key(|traffic| Reverse((traffic.busy, traffic.bytes)));
    let outcome = |Traffic { link, bytes, busy }: Traffic| LinkTraffic {
        link: names.name(link),
        bytes,
        busy_s: busy.as_secs_f64(),
        load: busy.as_secs_f64() / seconds,
    };
    used.into_iter().map(outcome).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::ComputeModel;
    use paramill_core::policy::Axis;
    use paramill_core::waits::WaitCause;

    fn hash(scenario: &Scenario) -> String {
        let report = run_scenario(scenario).unwrap();
        assert!(report.finished, "{report:?}");
        report.tables[0].hash.clone()
    }

    #[test]
    fn the_same_seed_gives_the_same_report_and_another_seed_another() {
        let compute = ComputeModel { jitter: 1.0, ..Default::default() };
        let scenario = Scenario { compute, ..Scenario::new(3, 2, 200).with(Axis::Sync, "ssp:s=1") };
        let report = run_scenario(&scenario).unwrap();
        assert_eq!(report, run_scenario(&scenario).unwrap());
        assert_eq!(report.iterations, 150);
        assert!(report.seconds > 0.5 && report.sync.dprs > 0, "{report:?}");
        assert_ne!(report, run_scenario(&Scenario { seed: 1, ..scenario }).unwrap());
    }

    #[test]
    fn a_synchronous_job_ends_with_the_same_bits_whatever_the_network_does() {
        let calm = Scenario::new(4, 2, 300);
        let faults =
            ["worker=1:slow=3x", "push:delay=30ms,p=0.1", "link:reset,p=0.03", "server=1:pause=1s@0.1s"];
        let rough = Scenario { faults: faults.map(String::from).to_vec(), ..calm.clone() };
        assert_eq!(hash(&calm), hash(&rough));
        let sync = run_scenario(&rough).unwrap().sync;
        assert!(sync.duplicates > 0 && sync.pushes == 4 * 50, "pushes were sent again: {sync:?}");
    }

    /// Some frames of a late answer are slowed with their connection, others not: they used to overtake each other.
    #[test]
    fn late_answers_on_slow_connections_stay_whole() {
        let calm = Scenario::new(3, 2, 300).with(Axis::Chunk, "32B");
        let faults = ["pull:delay=20ms,p=0.3", "link:delay=1ms,p=0.3"];
        let rough = Scenario { faults: faults.map(String::from).to_vec(), ..calm.clone() };
        assert_eq!(hash(&calm), hash(&rough));
    }

    #[test]
    fn partially_synchronous_with_everybody_is_synchronous() {
        let bsp = Scenario::new(4, 2, 300);
        let psp = bsp.clone().with(Axis::Sync, "psp:c=4,b=1");
        assert_eq!(hash(&bsp), hash(&psp));
    }

    #[test]
    fn a_run_that_does_not_finish_says_what_everybody_was_doing() {
        let scenario = Scenario { limit_s: 0.2, ..Scenario::new(2, 1, 10) };
        let report = run_scenario(&scenario).unwrap();
        assert!(!report.finished && report.iterations < 100, "{report:?}");
        assert!(report.workers[0].doing.contains("iteration"), "{}", report.workers[0].doing);
    }

    /// What each worker waited, and what is charged of it.
    fn waited(scenario: &Scenario) -> Vec<(Waited, Duration)> {
        let mut cluster = Cluster::new(scenario).unwrap();
        let mut watch = StallWatch::new(scenario, &scenario.fault_plan().unwrap());
        let until = Time::from_secs_f64(scenario.limit_s);
        cluster.run(until, &mut watch).unwrap_or_else(|violation| panic!("{violation}"));
        let players = cluster.worker_ids().map(|id| cluster.player(id)).collect::<Vec<_>>();
        assert!(players.iter().all(|player| player.is_finished()));
        players.iter().map(|player| (player.worker().report().waited, player.times().waited)).collect()
    }

    #[test]
    fn all_waiting_is_charged_and_most_of_it_to_the_straggler() {
        let slow = |scenario: Scenario| Scenario { faults: vec!["worker=1:slow=3x".into()], ..scenario };
        let calm = || Scenario::new(4, 2, 300);
        for scenario in [
            slow(calm()),
            slow(calm().with(Axis::Sync, "ssp:s=2")),
            slow(calm().with(Axis::Sync, "bsp:overlap=false")),
            slow(calm().with(Axis::Broadcast, "chain")),
            slow(Scenario { aggregators: 2, ..calm().with(Axis::Order, "arrival") }),
        ] {
            let sync = (scenario.policy.get(Axis::Sync), scenario.policy.get(Axis::Broadcast));
            let of_workers = waited(&scenario);
            for (waited, of_player) in &of_workers {
                assert!((waited.charged() - waited.seconds).abs() < 1e-6, "{sync:?}: {waited:?}");
                // The player counts the waits for parameters, and not that for the start and that when it leaves.
                let others = [WaitCause::Coordinator, WaitCause::Servers].map(|cause| waited.of(cause));
                let start: f64 = (0..4).map(|rank| waited.of(WaitCause::Start(WorkerId(rank)))).sum();
                let beside = waited.seconds - of_player.as_secs_f64();
                let most = start + others.iter().sum::<f64>() + 0.01;
                assert!((0.0..=most).contains(&beside), "{sync:?}: {of_player:?} of {waited:?}");
            }
            let all = Waited::sum(of_workers.iter().map(|(waited, _)| waited));
            let straggler = all.of(WaitCause::Push(WorkerId(1)));
            assert_eq!(all.causes[0].cause, WaitCause::Push(WorkerId(1)), "{sync:?}: {all:?}");
            assert!(straggler > 0.5 * all.seconds, "{sync:?}: {all:?}");
        }
    }

    #[test]
    fn partial_pulls_and_servers_that_stand_still_are_charged_too() {
        let psp = Scenario::new(4, 2, 300).with(Axis::Sync, "psp:c=2,b=0.5");
        let uniform = Scenario::new(4, 2, 300).with(Axis::Placement, "uniform").with(Axis::Chunk, "32B");
        let paused = Scenario { faults: vec!["server=1:pause=2s@0.1s".into()], ..uniform };
        for scenario in [psp, paused.clone()] {
            for (waited, _) in waited(&scenario) {
                assert!((waited.charged() - waited.seconds).abs() < 1e-6, "{waited:?}");
            }
        }
        let all = run_scenario(&paused).unwrap().waited;
        let slow = all.of(WaitCause::Server(ServerId(1)));
        assert!((7.0..9.0).contains(&slow), "all four workers waited for two seconds: {all:?}");
    }
}
