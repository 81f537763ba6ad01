//! Checkpoints: one version everywhere while workers go on, resumed on other numbers of everything, and never half.

use super::bench::{Bench, COORDINATOR};
use super::{W, job};
use paramill_core::checkpoint::{CheckpointPolicy, Every, Manifest};
use paramill_core::coordinator::{Checkpointing, JobConfig};
use paramill_core::table::TableSpec;
use paramill_core::types::TableId;
use paramill_core::worker::{Gradient, Ticket};
use paramill_sim::archive::Archive;
use std::collections::BTreeMap;
use std::time::Duration;

const ELEMENTS: usize = 40;
/// Nobody pushes it.
const FROZEN: usize = 5;
const ADAM: &str = "adam:lr=0.1";

type Tables = Vec<(TableSpec, Vec<f32>)>;

fn tables() -> Tables {
    vec![(TableSpec::dense("w", [ELEMENTS as u64]), (0..ELEMENTS).map(|at| at as f32).collect())]
}

fn with_frozen() -> Tables {
    let frozen = (TableSpec::dense("frozen", [FROZEN as u64]).alone(), vec![3.0; FROZEN]);
    tables().into_iter().chain([frozen]).collect()
}

fn saving(config: JobConfig, every: u64, archive: &Archive, resumes: bool) -> JobConfig {
    let complete = archive.complete();
    let checkpoints = Checkpointing {
        policy: CheckpointPolicy { every: Every::Steps(every), keep: 2 },
        resume: complete.last().filter(|_| resumes).map(|newest| (*newest).clone()),
        kept: complete.iter().map(|manifest| (manifest.clock, manifest.folder.clone())).collect(),
    };
    JobConfig { checkpoints: Some(checkpoints), ..config }
}

/// A job that begins, or goes on from the newest checkpoint of an archive.
fn start(config: JobConfig, cores: u32, archive: Option<Archive>) -> Bench {
    start_with(&tables(), config, cores, &[], archive)
}

fn start_with(
    tables: &[(TableSpec, Vec<f32>)],
    config: JobConfig,
    cores: u32,
    through: &[usize],
    archive: Option<Archive>,
) -> Bench {
    let mut bench = Bench::with_aggregators(config, cores, through);
    *bench.world.archive_mut() = archive.unwrap_or_default();
    bench.world.archive_mut().set_latency(Duration::ZERO);
    bench.start(tables);
    bench
}

/// Lets workers train until all have completed so many iterations: every gradient depends on its worker and its clock.
fn train(bench: &mut Bench, until: u64) {
    let mut pending: BTreeMap<usize, Ticket> = BTreeMap::new();
    for _ in 0..2000 {
        let mut done = true;
        for worker in 0..bench.worker_count() {
            if let Some(&ticket) = pending.get(&worker) {
                match bench.outcome(worker, ticket) {
                    Some(Ok(())) => drop(bench.worker_mut(worker).redeem(ticket)),
                    Some(Err(error)) => panic!("worker {worker}: {error}"),
                    None => {
                        done = false;
                        continue;
                    }
                }
                pending.remove(&worker);
            }
            let clock = bench.worker(worker).current_clock();
            if clock < until {
                let gradient =
                    |at: usize| ((at as f32 + 1.3) * (clock as f32 + 0.7) * (worker as f32 + 0.9)).sin();
                let gradient: Vec<f32> = (0..ELEMENTS).map(gradient).collect();
                let now = bench.now();
                let pushed = bench.worker_mut(worker).push(now, W, Gradient::Dense(&gradient), true);
                pending.insert(worker, pushed.expect("its clock is due"));
                bench.worker_mut(worker).clock();
                bench.run();
                done = false;
            }
        }
        if done {
            return;
        }
        bench.pass(0.02);
    }
    panic!("they wait for ever: {:?}", bench.log());
}

fn bits(bench: &Bench) -> Vec<u32> {
    bench.parameters(W, ELEMENTS).into_iter().map(f32::to_bits).collect()
}

fn clocks(bench: &Bench) -> Vec<u64> {
    bench.world.archive().complete().iter().map(|manifest| manifest.clock).collect()
}

/// Every shard held the version of the checkpoint of everything that is pushed.
fn assert_cut(archive: &Archive, manifest: &Manifest) {
    let cuts = archive.cuts(manifest);
    assert_eq!(cuts.len(), manifest.files.len());
    let tables = || cuts.iter().flat_map(|cut| &cut.tables);
    assert_eq!(tables().map(|table| table.parameters.len()).sum::<usize>(), ELEMENTS);
    assert!(tables().all(|table| table.version == manifest.clock), "{}", manifest.folder);
}

#[test]
fn a_cut_is_one_version_everywhere_and_the_job_goes_on_with_the_same_bits() {
    for sync in ["bsp", "bsp:overlap=false", "drop:n=1"] {
        let whole = {
            let mut bench = start(job(3, 2, sync, ADAM), 2, None);
            train(&mut bench, 25);
            bits(&bench)
        };
        let config = || job(3, 2, sync, ADAM);
        let mut bench = start(saving(config(), 5, &Archive::default(), false), 2, None);
        train(&mut bench, 23);
        bench.pass(1.0);
        assert_eq!(clocks(&bench), [15, 20], "{sync}: {:?}", bench.log());
        let archive = bench.world.archive().clone();
        archive.complete().into_iter().for_each(|manifest| assert_cut(&archive, manifest));
        // On other servers and cores; workers are as many as before.
        for (servers, cores) in [(2, 2), (1, 1), (3, 2)] {
            let config = saving(job(3, servers, sync, ADAM), 5, &archive, true);
            let mut bench = start(config, cores, Some(archive.clone()));
            assert!((0..3).all(|worker| bench.worker(worker).current_clock() == 20));
            train(&mut bench, 25);
            if sync != "drop:n=1" {
                assert_eq!(bits(&bench), whole, "{sync} on {servers} servers with {cores} cores");
            }
            assert_eq!(bench.stopped(), []);
        }
    }
}

#[test]
fn every_model_goes_on_with_another_number_of_workers_and_through_aggregators() {
    let models = [
        "bsp",
        "asp",
        "ssp:s=2",
        "dsps:min=1,max=4",
        "drop:n=2",
        "pssp:s=1,c=0.5",
        "psp:c=2,tau1=0.01",
        "quorum:q=0.7",
    ];
    for sync in models {
        let config = saving(job(3, 2, sync, ADAM), 4, &Archive::default(), false);
        // Nobody pushes one of the tables: its version stays 0.
        let mut bench = start_with(&with_frozen(), config, 1, &[], None);
        train(&mut bench, 30);
        bench.pass(1.0);
        let archive = bench.world.archive().clone();
        let clock = *clocks(&bench).last().unwrap_or_else(|| panic!("{sync}: {:?}", bench.log()));
        assert_eq!(clock % 4, 0, "{sync}");
        for (workers, through) in [(2, &[][..]), (4, &[0, 0, 0, 0])] {
            let config = saving(job(workers, 1, sync, ADAM), 4, &archive, true);
            let mut bench = start_with(&with_frozen(), config, 2, through, Some(archive.clone()));
            assert_eq!(bench.parameters(TableId(1), FROZEN), [3.0; FROZEN]);
            assert!(
                (0..workers as usize).all(|worker| bench.worker(worker).current_clock() == clock),
                "{sync}"
            );
            train(&mut bench, clock + 20);
            bench.pass(1.0);
            assert!(clocks(&bench).last() > Some(&clock), "{sync}: {:?}", bench.log());
            assert_eq!(bench.stopped(), [], "{sync}: {:?}", bench.log());
        }
    }
}

#[test]
fn a_full_disk_costs_the_checkpoint_and_nothing_else() {
    let config = saving(job(2, 2, "bsp", ADAM), 5, &Archive::default(), false);
    let mut bench = start(config, 1, None);
    train(&mut bench, 20);
    bench.pass(1.0);
    assert_eq!(clocks(&bench), [15, 20]);
    bench.world.archive_mut().set_full(true);
    train(&mut bench, 60);
    bench.pass(1.0);
    assert_eq!(clocks(&bench), [15, 20]);
    let told = bench.log().into_iter().find(|line| line.contains("failed"));
    let told = told.expect("it is told").to_owned();
    assert!(
        told.contains("no space left") && told.contains("step-0000000020") && told.contains("stays"),
        "{told}"
    );
    bench.world.archive_mut().set_full(false);
    train(&mut bench, 100);
    bench.pass(1.0);
    assert!(clocks(&bench).last() > Some(&60), "{:?}", bench.log());
}

#[test]
fn whoever_dies_during_a_checkpoint_leaves_the_old_one() {
    for victim in 0..4 {
        let config = saving(job(2, 2, "bsp", ADAM), 5, &Archive::default(), false);
        let mut bench = start(config, 1, None);
        train(&mut bench, 20);
        bench.pass(1.0);
        bench.world.archive_mut().set_latency(Duration::from_secs(2));
        let before = clocks(&bench);
        train(&mut bench, 40);
        let node = [COORDINATOR, bench.shard_node(0), bench.shard_node(1), bench.worker_node(1)][victim];
        let now = bench.now();
        bench.world.crash(node, now);
        bench.pass(1.0);
        assert_eq!(clocks(&bench), before, "nothing is complete yet");
        bench.pass(30.0);
        // A worker has no part in what is being written.
        assert_eq!(clocks(&bench) != before, victim == 3, "{victim}: {:?}", bench.log());
        let archive = bench.world.archive().clone();
        archive.complete().into_iter().for_each(|manifest| assert_cut(&archive, manifest));
        let mut bench = start(saving(job(2, 3, "bsp", ADAM), 5, &archive, true), 1, Some(archive));
        train(&mut bench, 50);
    }
}

#[test]
fn a_job_that_ends_leaves_what_it_came_to() {
    let config = saving(job(2, 2, "bsp", ADAM), 1000, &Archive::default(), false);
    let mut bench = start(config, 1, None);
    train(&mut bench, 7);
    let trained = bits(&bench);
    for worker in 0..2 {
        let now = bench.now();
        bench.worker_mut(worker).leave(now);
        bench.run();
    }
    bench.pass(1.0);
    assert_eq!(clocks(&bench), [7], "{:?}", bench.log());
    assert!(
        bench.stopped().len() >= 3 && bench.stopped().iter().all(Option::is_none),
        "{:?}",
        bench.stopped()
    );
    let archive = bench.world.archive().clone();
    let bench = start(saving(job(1, 1, "bsp", ADAM), 5, &archive, true), 1, Some(archive));
    assert_eq!(bits(&bench), trained);
}

#[test]
fn what_does_not_fit_the_checkpoint_is_told() {
    let config = saving(job(2, 1, "bsp", ADAM), 5, &Archive::default(), false);
    let mut bench = start(config, 1, None);
    train(&mut bench, 20);
    bench.pass(1.0);
    let archive = bench.world.archive().clone();
    let tell = |optimizer: &str, tables: &[(TableSpec, Vec<f32>)], archive: Archive| {
        let mut bench = Bench::new(saving(job(2, 1, "bsp", optimizer), 5, &archive, true), 1);
        *bench.world.archive_mut() = archive;
        bench.declare_and_start(tables);
        bench.pass(1.0);
        bench.stopped().into_iter().flatten().next().expect("the job fails")
    };
    let why = tell("sgd:lr=0.1", &tables(), archive.clone());
    assert!(why.contains("has the state of `adam") && why.contains("use --optimizer adam"), "{why}");
    let why = tell(ADAM, &with_frozen(), archive.clone());
    assert!(why.contains("has no table `frozen`; it has w"), "{why}");
    // The files are gone.
    let manifest = (*archive.complete().last().expect("one")).clone();
    let mut empty = Bench::new(
        JobConfig {
            checkpoints: Some(Checkpointing {
                policy: CheckpointPolicy { every: Every::Asked, keep: 1 },
                resume: Some(manifest),
                kept: vec![],
            }),
            ..job(2, 1, "bsp", ADAM)
        },
        1,
    );
    empty.declare_and_start(&tables());
    empty.pass(1.0);
    let why = empty.stopped().into_iter().flatten().next().expect("the job fails");
    assert!(
        why.contains("cannot go on from checkpoint step-") && why.contains("in none of its files"),
        "{why}"
    );
}
