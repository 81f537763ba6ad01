//! Layers of tables over sockets: norms are theirs, and policies name them.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

mod servers;

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_core::status::PackNames;
use paramill_node::admin::Admin;
use paramill_node::client::{JobPolicies, Layer, Pack, Registry, Table, TableSpec};
use servers::{join, start_servers};
use std::time::Duration;

const STEPS: usize = 10;
/// Elements of each layer. The first is longer than several chunks.
const LAYERS: [(&str, usize); 3] = [("fc", 30_000), ("fc.bias", 100), ("scale", 1)];

fn values(layer: usize, seed: usize) -> Vec<f32> {
    let length = [0.2, 30.0, 4.0][layer];
    (0..LAYERS[layer].1).map(|at| length * ((at * 7 + seed * 5) % 23) as f32 / 23.0 - 0.4 * length).collect()
}

/// All layers, one after the other.
fn pack() -> TableSpec {
    let mut start = 0;
    let layer = |(name, len): (&str, usize)| {
        let layer = Layer { name: name.into(), start, shape: vec![len as u64] };
        start += len as u64;
        layer
    };
    let layers = LAYERS.map(layer).to_vec();
    TableSpec { layers, ..TableSpec::dense("all", [start]) }
}

fn together(seed: usize) -> Vec<f32> {
    (0..LAYERS.len()).flat_map(|layer| values(layer, seed)).collect()
}

/// The parameters after [`STEPS`] steps of two workers.
fn train(servers: u32, cores: u32, packed: bool) -> Vec<f32> {
    let policy = Policy::default()
        .with(Axis::Optimizer, "lars:lr=1,weight_decay=0.01,trust=0.02")
        .with(Axis::Placement, "uniform");
    let config = JobConfig { policy, ..JobConfig::new("test", 2, servers) };
    let (servers, url) = start_servers(&config, cores);
    let worker = |rank: u32| {
        let job = join(&url, rank);
        let tables = match packed {
            true => vec![job.table(pack(), together(0)).unwrap()],
            false => {
                let table = |(layer, (name, len)): (usize, (&str, usize))| {
                    job.table(TableSpec::dense(name, [len as u64]), values(layer, 0)).unwrap()
                };
                LAYERS.into_iter().enumerate().map(table).collect()
            }
        };
        job.start().unwrap();
        for step in 1..=STEPS {
            let seed = 2 * step + rank as usize;
            for (layer, table) in tables.iter().enumerate() {
                let gradient = if packed { together(seed) } else { values(layer, seed) };
                table.update(&gradient).unwrap();
            }
            job.clock();
            tables.iter().for_each(|table| table.sync().unwrap());
        }
        let read = |table: &Table| table.read(<[f32]>::to_vec).unwrap();
        let parameters: Vec<f32> = tables.iter().flat_map(read).collect();
        job.close().unwrap();
        parameters
    };
    let finals = std::thread::scope(|scope| {
        let workers = [0, 1].map(|rank| scope.spawn(move || worker(rank)));
        workers.map(|worker| worker.join().unwrap())
    });
    servers.into_iter().for_each(|server| server.join().unwrap());
    let [first, second] = finals;
    assert!(first == second, "replicas differ");
    first
}

#[test]
fn lars_is_the_same_on_one_server_and_on_four_packed_and_unpacked() {
    let expected = train(1, 1, false);
    assert!(expected.iter().zip(together(0)).all(|(after, before)| after.is_finite() && *after != before));
    for (servers, cores, packed) in [(1, 1, true), (4, 2, false), (4, 2, true)] {
        for (found, expected) in train(servers, cores, packed).iter().zip(&expected) {
            let error = (found - expected).abs() / expected.abs().max(1e-3);
            assert!(error <= 1e-6, "{servers} servers, packed {packed}: {found} instead of {expected}");
        }
    }
}

#[test]
fn what_would_need_a_cut_table_whole_or_a_part_of_a_pack_is_refused_with_the_remedy() {
    let policy = Policy::default().with(Axis::Placement, "uniform");
    let config = JobConfig { policy, ..JobConfig::new("test", 1, 2) };
    let (servers, url) = start_servers(&config, 1);
    let job = join(&url, 0);
    let spec = TableSpec::dense("cut", [100, 50]);
    job.table(spec, vec![0.0; 5000]).unwrap();
    job.table(pack(), together(0)).unwrap();
    job.start().unwrap();
    let mut admin = Admin::connect(&url, Duration::from_secs(5)).unwrap();
    let mut set = |table: &str, axis: Axis, text: &str| {
        let change = PolicyOverride::new(table, Policies::of([(axis, text)]));
        admin.set(change).map_err(|error| error.to_string())
    };
    let why = set("cut", Axis::Codec, "powersgd:rank=2").unwrap_err();
    assert!(why.contains("table `cut` is cut over 2 data cores, and powersgd"), "{why}");
    assert!(why.contains("start the job with it, for all tables or for this one"), "{why}");
    let why = set("fc*", Axis::Sync, "asp").unwrap_err();
    assert!(why.contains("`fc*` names `fc`, but not `scale`, and these travel in one table, `all`"), "{why}");
    assert!(why.contains("name all of them, or give the policy when the job starts"), "{why}");
    let why = set("all", Axis::Sync, "asp").unwrap_err();
    assert!(why.contains("no table matches `all`; the job has cut, fc, fc.bias, scale"), "{why}");
    assert_eq!(set("*", Axis::Sync, "asp").unwrap(), "4 tables now have sync=asp on all servers");
    job.close().unwrap();
    servers.into_iter().for_each(|server| server.join().unwrap());
}

#[test]
fn small_tensors_are_packed_by_the_policies_that_the_job_has_for_their_names() {
    let rule = |table: &str, codec: &str| PolicyOverride::new(table, Policies::of([(Axis::Codec, codec)]));
    let config = JobConfig { overrides: vec![rule("*.bias", "f16")], ..JobConfig::new("test", 1, 1) };
    let tensors = ["conv.bias", "conv.scale", "fc.bias", "fc.scale"].map(|name| TableSpec::dense(name, [4]));
    let (servers, url) = start_servers(&config, 1);
    let job = join(&url, 0);
    let policies = job.policies().unwrap();
    assert_eq!(policies, JobPolicies { policy: config.policy.clone(), overrides: config.overrides.clone() });
    let packs =
        Pack::divide(tensors.clone(), 4, |one, other| policies.are_alike(&Registry::builtin(), one, other));
    let tables: Vec<Table> =
        packs.iter().map(|pack| job.table(pack.spec().clone(), vec![1.0; 8]).unwrap()).collect();
    job.start().unwrap();
    assert_eq!([0, 1].map(|pack| tables[pack].codec().unwrap()), ["f16", ""]);
    let mut admin = Admin::connect(&url, Duration::from_secs(5)).unwrap();
    assert_eq!(
        admin.set(rule("*.scale", "topk:0.5")).unwrap(),
        "2 tables now have codec=topk:0.5 on all servers"
    );
    let names = |table: &str, layers: [&str; 2]| PackNames {
        table: table.into(),
        layers: layers.map(String::from).to_vec(),
    };
    assert_eq!(
        job.status().unwrap().packs,
        [
            names("conv.bias and 1 more", ["conv.bias", "fc.bias"]),
            names("conv.scale and 1 more", ["conv.scale", "fc.scale"])
        ]
    );
    job.close().unwrap();
    servers.into_iter().for_each(|server| server.join().unwrap());

    // Packed without a look at the policies.
    let (_servers, url) = start_servers(&config, 1);
    let job = join(&url, 0);
    let packs = Pack::divide(tensors, 4, |_, _| true);
    job.table(packs[0].spec().clone(), vec![1.0; 16]).unwrap();
    let why = job.start().unwrap_err().to_string();
    assert!(why.contains("`conv.bias` and `conv.scale` have codec=f16 and codec=none"), "{why}");
}
