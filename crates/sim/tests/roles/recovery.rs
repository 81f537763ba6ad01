//! The coordinator dies at any moment, and is started anew with what it has stored: the job goes on, and nobody else is started anew.

use paramill_core::types::{NodeId, TableId, Time};
use paramill_sim::cluster::{Cluster, Play};
use paramill_sim::gradient::Gradients;
use paramill_sim::scenario::Scenario;
use paramill_sim::world::{Ended, Unobserved};

const WORKERS: u32 = 3;
const JOINS: u32 = 1;

/// A job of 8 iterations of 20 ms, of which the coordinator is gone from `at_ms` on for `for_ms`.
fn scenario(more: &str, at_ms: f64, for_ms: f64) -> Scenario {
    let text = format!(
        "workers = {WORKERS}\nservers = 2\ncores = 2\niterations = 8\nchunk = '32B'\norder = 'arrival'\nreduce = 'sum'\n\
         optimizer = 'sgd:lr=1'\nfaults = ['coordinator:crash@{at_ms}ms,restart={for_ms}ms']\n{more}\n\
         [[tables]]\nname = 'w'\nshape = [40]\n[compute]\nstep_ms = 20.0\n"
    );
    Scenario::parse(&text).expect("the scenario can be run")
}

/// So long that a worker which comes while the coordinator waits for its members joins after that.
fn long(scenario: Scenario) -> Scenario {
    Scenario { iterations: 450, ..scenario }
}

/// Runs it to its end; everybody has finished, and nothing was lost or counted twice.
fn finished(scenario: &Scenario, joins_at: Option<f64>) -> Cluster {
    let workers = scenario.workers + JOINS;
    let play = Play { gradients: Gradients::Tagged { workers }, ..Play::default() };
    let mut cluster = Cluster::with(scenario, play).expect("the scenario can be run");
    joins_at.into_iter().for_each(|at| cluster.join_later(Time::from_secs_f64(at)));
    let ended = cluster.run(Time::from_secs_f64(200.0), &mut Unobserved);
    let faults = &scenario.faults;
    assert_eq!(ended, Ok(true), "{faults:?}: {:?}", cluster.world.log().collect::<Vec<_>>());
    for id in cluster.worker_ids() {
        let player = cluster.player(id);
        assert!(player.is_finished(), "{faults:?}: {id} {}", player.doing(cluster.world.now()));
    }
    let shards = cluster.shard_ids().map(NodeId::Shard).chain([NodeId::Coordinator]);
    for node in shards {
        assert_eq!(cluster.world.ended(node), Some(&Ended::Stopped { error: None }), "{faults:?}: {node}");
    }
    cluster
}

/// Moments in the life of the job: before members are there, while it starts, while it runs, while it ends.
fn moments() -> impl Iterator<Item = f64> {
    (0..24).map(|step| f64::from(step) * 0.4).chain((1..12).map(|step| f64::from(step) * 19.0 + 0.3))
}

#[test]
fn a_job_ends_with_the_same_bits_whenever_its_coordinator_dies() {
    let calm = finished(&Scenario { faults: vec![], ..scenario("sync = 'bsp'", 0.0, 1.0) }, None);
    for at_ms in moments() {
        for for_ms in [1.0, 9000.0] {
            let cluster = finished(&scenario("sync = 'bsp'", at_ms, for_ms), None);
            assert_eq!(cluster.parameters(TableId(0)), calm.parameters(TableId(0)), "at {at_ms} ms");
        }
    }
}

#[test]
fn a_scheduler_between_push_and_pull_is_made_anew() {
    for at_ms in moments() {
        finished(&scenario("sync = 'bsp:overlap=false'", at_ms, 50.0), None);
        finished(&scenario("sync = 'ssp:s=2,overlap=false'", at_ms, 50.0), None);
    }
    for at_ms in [99.0, 100.2, 100.5, 130.0] {
        finished(&long(scenario("sync = 'bsp:overlap=false'", at_ms, 50.0)), Some(0.1));
    }
}

#[test]
fn a_worker_joins_and_policies_change_while_the_coordinator_dies() {
    let switch = "sync = 'bsp'\n[[switches]]\nat_s = 0.06\nsync = 'ssp:s=1'";
    for at_ms in (0..30).map(|step| 50.0 + f64::from(step) * 0.7) {
        let cluster = finished(&long(scenario(switch, at_ms, 30.0)), Some(0.055));
        assert_eq!(cluster.worker_ids().count() as u32, WORKERS + JOINS);
    }
}

#[test]
fn aggregators_and_readers_come_back_too() {
    for more in ["aggregators = 2", "broadcast = 'chain'\nreaders = 2"] {
        for at_ms in moments().step_by(3) {
            finished(&scenario(&format!("sync = 'bsp'\n{more}"), at_ms, 20.0), None);
        }
    }
}

/// All workers have left before some of the shards are back: these close the last rounds too, of which nobody who left is waited for.
#[test]
fn a_job_that_ends_while_shards_come_back_to_its_coordinator_lacks_nothing() {
    let held = "sync = 'ssp:s=3'\nhold = 'significance:1.531,most=3'";
    let calm = finished(&Scenario { faults: vec![], ..scenario(held, 0.0, 1.0) }, None);
    for at_ms in [90.0, 110.0, 130.0, 150.0] {
        for delay in 0..12 {
            let mut scenario = scenario(held, at_ms, 1000.0);
            let fault = format!("server=0:delay={}us", 300 * delay + 100);
            scenario.faults.push(fault);
            let cluster = finished(&scenario, None);
            assert_eq!(cluster.parameters(TableId(0)), calm.parameters(TableId(0)), "{:?}", scenario.faults);
        }
    }
}
