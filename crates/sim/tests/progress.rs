//! Members that live and make no progress while others wait for them: they are named, and by policy left behind.

use paramill_core::fault::{Delay, Fate};
use paramill_core::status::{MemberState, Status};
use paramill_core::types::{NodeId, ServerId, TableId, Time};
use paramill_sim::actor::Actor;
use paramill_sim::cluster::Cluster;
use paramill_sim::rule::{FrameView, Rule};
use paramill_sim::scenario::Scenario;
use paramill_sim::world::Unobserved;
use std::time::Duration;

fn scenario(sync: &str, more: &str) -> Scenario {
    let text = format!(
        "workers = 3\nservers = 2\niterations = 200\ntags = true\nsync = '{sync}'\noptimizer = 'sgd:lr=1'\nreduce = 'sum'\norder = 'arrival'\n\
         chunk = '64B'\nplacement = 'uniform'\nlimit_s = 60\n{more}\n[[tables]]\nname = 'w'\nshape = [300]\n[compute]\nstep_ms = 20\n"
    );
    Scenario::parse(&text).expect("the scenario can be run")
}

/// Whether the job ended in time, its status in the end, and its log.
fn run(scenario: &Scenario, disturb: impl FnOnce(&mut Cluster)) -> (bool, Status, String, Cluster) {
    let mut cluster = Cluster::new(scenario).expect("the scenario can be run");
    disturb(&mut cluster);
    let limit = Time::from_secs_f64(scenario.limit_s);
    let ended = cluster.run(limit, &mut Unobserved).expect("nothing is violated");
    let Some(Actor::Coordinator(coordinator)) = cluster.world.role(NodeId::Coordinator) else {
        panic!("there is a coordinator")
    };
    let status = coordinator.status(limit);
    let log = cluster.world.log().collect::<Vec<_>>().join("\n");
    (ended, status, log, cluster)
}

#[test]
fn a_worker_that_hangs_is_named_and_left_behind_by_policy() {
    for (sync, more) in [
        ("bsp", ""),
        ("ssp:s=2", ""),
        ("bsp:overlap=false", ""),
        ("bsp", "aggregators = 1"),
        ("bsp", "broadcast = 'star'"),
    ] {
        let more = format!("faults = ['worker=2:stall@2s']\n{more}");
        let (ended, status, log, _) = run(&scenario(sync, &more), |_| {});
        assert!(!ended, "{sync}: the others wait for ever\n{log}");
        let [stalled] = &status.stalled[..] else { panic!("{sync} {more}: {:?}\n{log}", status.stalled) };
        assert_eq!(
            (stalled.node.as_str(), stalled.holds_up.as_str()),
            ("worker 2", "worker 0, worker 1 (table `w`)")
        );
        assert!((55.0..58.0).contains(&stalled.seconds), "{sync} {more}: {}", stalled.seconds);
        assert!(log.contains("worker 2 lives and makes no progress for 1"), "{log}");

        let (ended, status, log, _) =
            run(&scenario(sync, &format!("progress_timeout_s = 5\n{more}")), |_| {});
        assert!(ended && status.stalled.is_empty(), "{sync} {more}: {log}");
        assert!(log.contains("it is left behind") && log.contains("worker 2 is declared dead"), "{log}");
        let states: Vec<MemberState> = status.workers.iter().map(|worker| worker.state).collect();
        assert_eq!(states, [MemberState::Left, MemberState::Left, MemberState::Dead], "{sync} {more}");
    }
}

#[test]
fn long_steps_are_no_stall_while_nobody_waits_for_them() {
    // One of them takes 12 s for a step that nobody waits for; all of them do, and wait for each other for less than a second.
    for (sync, iterations, faults) in [
        ("asp", 4, "'worker=2:slow=600x'"),
        ("bsp", 3, "'worker=*:slow=600x'"),
        ("bsp", 3, "'worker=*:slow=600x', 'worker=0:slow=1.1x'"),
    ] {
        let scenario = scenario(sync, &format!("progress_timeout_s = 5\nfaults = [{faults}]"));
        let (ended, _, log, _) = run(&Scenario { iterations, ..scenario }, |_| {});
        assert!(ended && !log.contains("no progress"), "{sync}: {log}");
    }
}

/// Workers and one server do not hear each other; the coordinator hears all of them. What is sent in that time is lost in connections that do not
/// break, and none are made any more.
#[derive(Debug)]
struct Deaf {
    server: ServerId,
    from: Time,
    until: Time,
}

impl Deaf {
    fn separates(&self, one: NodeId, other: NodeId) -> bool {
        let is_meant = |worker: NodeId, shard: NodeId| matches!((worker, shard), (NodeId::Worker(_), NodeId::Shard(shard)) if shard.server == self.server);
        is_meant(one, other) || is_meant(other, one)
    }
}

impl Rule for Deaf {
    fn on_frame(&mut self, frame: &FrameView<'_>) -> Fate {
        // A frame to a copy that has taken over is one to the shard.
        match (self.from..self.until).contains(&frame.now) && self.separates(frame.from, frame.to) {
            true => Fate::Delay(Delay::of_connection(Duration::from_secs(1_000_000))),
            false => Fate::Pass,
        }
    }

    fn on_connect(&mut self, now: Time, from: NodeId, to: NodeId) -> Option<String> {
        (now >= self.from && self.separates(from, to)).then(|| format!("there is no way to {to}"))
    }
}

#[test]
fn a_server_that_answers_nobody_is_named_and_its_copies_take_over() {
    for sync in ["bsp", "asp", "ssp:s=2"] {
        let deaf = |until| {
            move |cluster: &mut Cluster| {
                let [from, until] = [2.0, until].map(Time::from_secs_f64);
                cluster.world.rules().add(Deaf { server: ServerId(1), from, until });
            }
        };
        let (_, _, _, calm) = run(&scenario(sync, "replicas = 1"), |_| {});
        let (ended, status, log, _) = run(&scenario(sync, "replicas = 1"), deaf(60.0));
        assert!(!ended, "{log}");
        let named: Vec<&str> = status.stalled.iter().map(|stalled| stalled.node.as_str()).collect();
        assert_eq!(named, ["server 1 core 0"], "{sync}: {log}");
        let (ended, _, log, cluster) =
            run(&scenario(sync, "replicas = 1\nprogress_timeout_s = 5"), deaf(8.5));
        assert!(ended && log.contains("it is left behind for its copy"), "{sync}: {log}");
        let table = TableId(0);
        assert_eq!(cluster.parameters(table), calm.parameters(table), "{sync}");
    }
}
