//! Shards that have copies: servers die, come back and are drained, and nothing that was acknowledged is lost.

use paramill_core::types::{ServerId, TableId, Time};
use paramill_sim::cluster::Cluster;
use paramill_sim::scenario::Scenario;
use paramill_sim::world::Unobserved;
use std::time::Duration;

const MODELS: &[&str] = &["bsp", "asp", "ssp:s=2", "dsps:min=1,max=4", "pssp:s=1,c=0.5", "quorum:q=0.6"];

fn scenario(servers: u32, sync: &str, more: &str) -> Scenario {
    let text = format!(
        "workers = 3\nservers = {servers}\ncores = 2\nreplicas = 1\niterations = 200\ntags = true\nsync = '{sync}'\n\
         optimizer = 'sgd:lr=1'\nreduce = 'sum'\norder = 'arrival'\nchunk = '64B'\nlimit_s = 100\n{more}\n\
         [[tables]]\nname = 'w'\nshape = [300]\n[[tables]]\nname = 'rows'\nshape = [40, 3]\nrows = true\n\
         [compute]\nstep_ms = 20\n"
    );
    Scenario::parse(&text).expect("the scenario can be run")
}

/// The parameters in the end.
fn run(scenario: &Scenario, disturb: impl FnOnce(&mut Cluster)) -> Vec<Vec<f32>> {
    parameters(&run_to_the_end(scenario, disturb))
}

fn run_to_the_end(scenario: &Scenario, disturb: impl FnOnce(&mut Cluster)) -> Cluster {
    let mut cluster = Cluster::new(scenario).expect("the scenario can be run");
    disturb(&mut cluster);
    let ended = cluster.run(Time::from_secs_f64(scenario.limit_s), &mut Unobserved);
    let log: Vec<&str> = cluster.world.log().collect();
    assert_eq!(ended.as_ref().map_err(|violation| &violation.what), Ok(&true), "{log:#?}");
    assert!(!log.iter().any(|line| line.contains("the job anew")), "{log:#?}");
    cluster
}

fn parameters(cluster: &Cluster) -> Vec<Vec<f32>> {
    [0, 1].map(|table| cluster.parameters(TableId(table))).to_vec()
}

/// When the last worker was done.
fn finished(cluster: &Cluster) -> Time {
    let times = cluster.worker_ids().map(|worker| cluster.player(worker).times().finished);
    times.max().flatten().expect("every worker finishes")
}

fn at(seconds: f64) -> Time {
    Time::from_secs_f64(seconds)
}

#[test]
fn copies_do_not_change_what_comes_of_a_job() {
    let scenario = scenario(2, "bsp", "");
    let alone = Scenario { replicas: 0, ..scenario.clone() };
    assert_eq!(run(&scenario, |_| {}), run(&alone, |_| {}));
}

#[test]
fn a_server_that_dies_is_replaced_by_the_copies_of_its_shards() {
    for sync in MODELS {
        let scenario = scenario(3, sync, "");
        let calm = run(&scenario, |_| {});
        for (server, when) in [(0, 1.3), (1, 2.0), (2, 2.51)] {
            let disturbed = run(&scenario, |cluster| cluster.crash_server(ServerId(server), at(when), None));
            // Under quorum a gradient may be late because of the pause, and is dropped.
            if !sync.contains("quorum") {
                assert_eq!(disturbed, calm, "{sync}, server {server} at {when} s");
            }
        }
    }
}

/// Workers wait for copies for twelve seconds at most, and go on while the server is still silent.
#[test]
fn copies_take_over_from_a_server_that_is_silent() {
    for sync in ["bsp", "asp", "ssp:s=2"] {
        let calm = run_to_the_end(&scenario(3, sync, ""), |_| {});
        for server in 0..3 {
            let silent = format!("faults = ['server={server}:pause=60s@2s']");
            let disturbed = run_to_the_end(&scenario(3, sync, &silent), |_| {});
            assert_eq!(parameters(&disturbed), parameters(&calm), "{sync}, server {server}");
            let later = finished(&disturbed).since(finished(&calm));
            assert!(later <= Duration::from_secs(12), "{sync}, server {server}: {later:?} later");
        }
    }
}

#[test]
fn one_server_after_the_other_dies_and_comes_back() {
    for sync in ["bsp", "asp", "ssp:s=2"] {
        // Long enough for all of them: what dies after the job is no matter of copies.
        let scenario = Scenario { iterations: 700, ..scenario(3, sync, "") };
        let calm = run(&scenario, |_| {});
        let disturbed = run(&scenario, |cluster| {
            for (number, server) in [0, 1, 2, 0, 1].into_iter().enumerate() {
                let when = 1.0 + 2.5 * number as f64;
                let after = Some(Duration::from_millis(300));
                cluster.crash_copied_server(ServerId(server), at(when), at(when + 2.0), after);
            }
        });
        assert_eq!(disturbed, calm, "{sync}");
    }
}

/// The coordinator dies within milliseconds of a server. What it had not stored by then it does not know afterwards, and so a server has
/// a copy that can take over only once that is stored.
#[test]
fn a_copied_server_and_the_coordinator_die_at_nearly_the_same_time() {
    for step in 0..60 {
        let crash_ms = 500 + step;
        let faults = format!("faults = ['coordinator:crash@{crash_ms}ms,restart=50ms']");
        let scenario = Scenario { iterations: 60, ..scenario(3, "asp", &faults) };
        let after = Some(Duration::from_millis(2));
        run(&scenario, |cluster| cluster.crash_copied_server(ServerId(1), at(0.1), at(0.7), after));
    }
}

/// The checkpoints that are complete in the end: each has one version of everything.
fn checkpoints(scenario: &Scenario, disturb: impl FnOnce(&mut Cluster)) -> Vec<u64> {
    let mut cluster = Cluster::new(scenario).expect("the scenario can be run");
    disturb(&mut cluster);
    let ended = cluster.run(Time::from_secs_f64(scenario.limit_s), &mut Unobserved);
    let log: Vec<&str> = cluster.world.log().collect();
    assert_eq!(ended.as_ref().map_err(|violation| &violation.what), Ok(&true), "{log:#?}");
    let archive = cluster.world.archive();
    for manifest in archive.complete() {
        let cuts = archive.cuts(manifest);
        assert_eq!(cuts.len(), manifest.files.len());
        let tables = || cuts.iter().flat_map(|cut| &cut.tables);
        assert_eq!(tables().map(|table| table.parameters.len()).sum::<usize>(), 300 + 40 * 3);
        assert!(tables().all(|table| table.version == manifest.clock), "{}", manifest.folder);
    }
    let complete: Vec<u64> = archive.complete().iter().map(|manifest| manifest.clock).collect();
    assert!(!complete.is_empty(), "{log:#?}");
    complete
}

#[test]
fn checkpoints_are_made_of_shards_that_have_copies_and_by_those_who_take_over() {
    let scenario = scenario(3, "bsp", "checkpoint_every = 7");
    assert_eq!(checkpoints(&scenario, |_| {}).last(), Some(&200));
    for (server, when) in [(0, 1.3), (1, 2.0), (2, 2.51), (1, 3.333), (2, 4.0)] {
        let complete =
            checkpoints(&scenario, |cluster| cluster.crash_server(ServerId(server), at(when), None));
        assert_eq!(complete.last(), Some(&200), "server {server} at {when} s");
    }
}

#[test]
fn checkpoints_are_made_while_the_coordinator_is_started_anew() {
    let faults = "faults = ['coordinator:crash@2s,restart=1s', 'coordinator:crash@4s,restart=100ms']\ncheckpoint_every = 7";
    let complete = checkpoints(&scenario(2, "bsp", faults), |_| {});
    assert_eq!(complete.last(), Some(&200));
}

/// The host of the coordinator dies, which serves shards too: another process coordinates the job from `after` on, with what was stored, and the copies
/// serve those shards.
#[test]
fn the_host_that_coordinates_and_serves_dies_and_the_job_goes_on_elsewhere() {
    for sync in ["bsp", "asp", "ssp:s=2"] {
        for (when, after) in [("1.3", "100ms"), ("2", "1s"), ("2.51", "6s"), ("3.333", "12s")] {
            let faults = format!("faults = ['coordinator:crash@{when}s,restart={after}']");
            let scenario = scenario(3, sync, &faults);
            let calm = run(&Scenario { faults: vec![], ..scenario.clone() }, |_| {});
            // The third server has no parameters.
            for server in 0..2 {
                let crash = at(when.parse().unwrap());
                let gone = run(&scenario, |cluster| cluster.crash_server(ServerId(server), crash, None));
                assert_eq!(gone, calm, "{sync}, server {server} at {when} s, coordinator after {after}");
                // The process is started again on that host, and its data cores are spare.
                let again = Some(Duration::from_secs(2));
                let back = run(&scenario, |cluster| cluster.crash_server(ServerId(server), crash, again));
                assert_eq!(back, calm, "{sync}, server {server} at {when} s, coordinator after {after}");
            }
        }
    }
}

/// A server that has come back gets copies, and then shards, from those that took its place. Whenever it dies again, the ones that had these shards
/// before have them still.
#[test]
fn a_server_may_die_whenever_shards_have_moved_to_it() {
    let scenario = scenario(3, "bsp", "");
    let calm = run(&scenario, |_| {});
    for step in 0..150 {
        let again = 1.4 + 0.02 * f64::from(step);
        let disturbed = run(&scenario, |cluster| {
            cluster.crash_server(ServerId(1), at(1.0), Some(Duration::from_millis(300)));
            cluster.crash_server(ServerId(1), at(again), None);
        });
        assert_eq!(disturbed, calm, "server 1 dies again at {again} s");
    }
}

/// A server is drained while somebody looks at the status all the time, which has shards report before it is due. Workers wait for no longer than moves
/// take, and the copies that the drained server leaves behind are not missed.
#[test]
fn a_server_that_is_watched_is_drained_without_a_long_pause() {
    for sync in ["bsp", "asp", "ssp:s=2"] {
        let calm = run_to_the_end(&scenario(3, sync, ""), |_| {});
        for step in 0..9 {
            let (server, at_s) = (step % 3, 1.0 + 0.007 * f64::from(step));
            let watched = format!("status_every_s = 0.02\n[[drains]]\nat_s = {at_s}\nserver = {server}\n");
            let drained = run_to_the_end(&scenario(3, sync, &watched), |_| {});
            assert_eq!(parameters(&drained), parameters(&calm), "{sync}, server {server} at {at_s} s");
            let later = finished(&drained).since(finished(&calm));
            assert!(later <= Duration::from_secs(1), "{sync}, server {server} at {at_s} s: {later:?} later");
        }
    }
}
