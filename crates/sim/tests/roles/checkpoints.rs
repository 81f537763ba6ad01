//! Checkpoints: one version everywhere while workers go on, resumed on other numbers of everything, and never half.

use super::bench::{Bench, COORDINATOR};
use super::{W, job};
use paramill_core::checkpoint::{ArrayKind, CheckpointPolicy, Every, Manifest};
use paramill_core::coordinator::{Checkpointing, JobConfig};
use paramill_core::policy::Axis;
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
        policy: Some(CheckpointPolicy { every: Every::Steps(every), keep: 2 }),
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
    train_with(bench, until, gradient);
}

fn gradient(worker: usize, clock: u64, at: usize) -> f32 {
    ((at as f32 + 1.3) * (clock as f32 + 0.7) * (worker as f32 + 0.9)).sin()
}

fn train_with(bench: &mut Bench, until: u64, gradient: fn(usize, u64, usize) -> f32) {
    train_those(bench, bench.worker_count(), until, gradient);
}

/// The same with the first so many workers.
fn train_those(bench: &mut Bench, workers: usize, until: u64, gradient: fn(usize, u64, usize) -> f32) {
    let mut pending: BTreeMap<usize, Ticket> = BTreeMap::new();
    for _ in 0..2000 {
        let mut done = true;
        for worker in 0..workers {
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
                let gradient: Vec<f32> = (0..ELEMENTS).map(|at| gradient(worker, clock, at)).collect();
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
fn what_workers_keep_from_servers_is_saved_with_the_version_and_kept_again() {
    let policies: [(&str, &[(Axis, &str)]); 6] = [
        ("topk", &[(Axis::Codec, "topk:0.1")]),
        ("dgc", &[(Axis::Codec, "dgc:ratio=0.1")]),
        ("onebit", &[(Axis::Codec, "onebit")]),
        ("dvf", &[(Axis::Codec, "dvf:delta=0.5")]),
        ("hold", &[(Axis::Hold, "variance:2,most=4")]),
        ("both", &[(Axis::Hold, "variance:2,most=3"), (Axis::Codec, "topk:0.2+f16")]),
    ];
    for (name, policy) in policies {
        let config = |workers: u32, servers| {
            let mut config = job(workers, servers, "bsp", ADAM);
            for (axis, text) in policy {
                config.policy = config.policy.with(*axis, *text);
            }
            config
        };
        let whole = {
            let mut bench = start(config(3, 2), 2, None);
            train(&mut bench, 27);
            bits(&bench)
        };
        let mut bench = start(saving(config(3, 2), 5, &Archive::default(), false), 2, None);
        train(&mut bench, 23);
        bench.pass(1.0);
        assert_eq!(clocks(&bench), [15, 20], "{name}: {:?}", bench.log());
        let archive = bench.world.archive().clone();
        for manifest in archive.complete() {
            let cuts = archive.worker_cuts(manifest);
            assert_eq!(cuts.len(), 3, "{name}");
            assert!(cuts.iter().all(|cut| cut.clock == manifest.clock));
        }
        for (servers, cores) in [(2, 2), (1, 1)] {
            let config = saving(config(3, servers), 5, &archive, true);
            let mut bench = start(config, cores, Some(archive.clone()));
            train(&mut bench, 27);
            // Means of 1-bit SGD are of chunks, and other servers have other chunks.
            if name != "onebit" || servers == 2 {
                assert_eq!(bits(&bench), whole, "{name} on {servers} servers");
            }
        }
    }
}

#[test]
fn what_workers_keep_is_not_lost_when_the_job_goes_on_with_more_or_fewer_of_them() {
    // Nothing is sent, so that everything is kept.
    let config = |workers| JobConfig {
        policy: job(workers, 1, "bsp", ADAM).policy.with(Axis::Codec, "threshold:1e9"),
        ..job(workers, 1, "bsp", ADAM)
    };
    let mut bench = start(saving(config(3), 5, &Archive::default(), false), 1, None);
    for worker in 0..3 {
        bench.worker_mut(worker).note("position", &[worker as u8, 7]).expect("a note");
    }
    train(&mut bench, 12);
    bench.pass(1.0);
    let archive = bench.world.archive().clone();
    let kept = |archive: &Archive, clock: u64| -> (usize, Vec<f32>) {
        let complete = archive.complete();
        let manifest = complete.iter().find(|manifest| manifest.clock == clock).expect("it is complete");
        let (cuts, mut sum) = (archive.worker_cuts(manifest), vec![0f32; ELEMENTS]);
        let residuals = cuts.iter().flat_map(|cut| &cut.arrays);
        for array in residuals.filter(|array| array.kind == ArrayKind::Residual) {
            sum.iter_mut().zip(&array.values).for_each(|(sum, value)| *sum += value);
        }
        (cuts.len(), sum)
    };
    let (files, before) = kept(&archive, 10);
    assert!(files == 3 && before.iter().any(|value| value.abs() > 1.0));
    for workers in [1, 2, 3, 5] {
        let mut bench = start(saving(config(workers), 5, &archive, true), 1, Some(archive.clone()));
        for worker in 0..workers as usize {
            let noted = bench.worker(worker).noted("position");
            assert_eq!(noted, Some(&[worker as u8 % 3, 7][..]), "{worker} of {workers}");
        }
        train_with(&mut bench, 16, |_, _, _| 0.0);
        bench.pass(1.0);
        let (_, after) = kept(bench.world.archive(), 15);
        let is_same = |(one, other): (&f32, &f32)| (one - other).abs() < 1e-4;
        assert!(before.iter().zip(&after).all(is_same), "{workers} workers: {before:?} and {after:?}");
    }
}

#[test]
fn a_worker_that_dies_or_has_nothing_to_save_holds_no_checkpoint_up() {
    let config = || JobConfig {
        policy: job(3, 1, "drop:n=2", ADAM).policy.with(Axis::Codec, "topk:0.1"),
        worker_timeout: Duration::from_secs(3),
        ..job(3, 1, "drop:n=2", ADAM)
    };
    let mut bench = start(saving(config(), 5, &Archive::default(), false), 1, None);
    train(&mut bench, 3);
    let (node, now) = (bench.worker_node(2), bench.now());
    bench.world.crash(node, now);
    for until in [8, 13, 18] {
        train_those(&mut bench, 2, until, gradient);
        bench.pass(5.0);
    }
    let archive = bench.world.archive().clone();
    let complete = archive.complete();
    let newest = complete.last().unwrap_or_else(|| panic!("{:?}", bench.log()));
    assert!(newest.clock >= 10, "{:?}", bench.log());
    assert_eq!(newest.worker_files.iter().map(|saved| saved.worker.0).collect::<Vec<_>>(), [0, 1]);
    // Without codecs there are no such files.
    let mut bench = start(saving(job(2, 1, "bsp", ADAM), 5, &Archive::default(), false), 1, None);
    train(&mut bench, 12);
    bench.pass(1.0);
    assert!(bench.world.archive().complete().iter().all(|manifest| manifest.worker_files.is_empty()));
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
                policy: Some(CheckpointPolicy { every: Every::Asked, keep: 1 }),
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
