//! Small tables that the library packs, over sockets: they train as they would alone, and keep their names.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

mod servers;

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_node::admin::Admin;
use paramill_node::client::{ClientError, Gradient, Handle, Job, Table, TableId, TableSpec};
use paramill_node::server::Server;
use paramill_node::url::JobUrl;
use servers::{join, start_servers};
use std::time::Duration;

fn policy(optimizer: &str) -> Policy {
    Policy::default().with(Axis::Optimizer, optimizer).with(Axis::Order, "ranked")
}

/// A job of one worker and one server with `count` tables of four elements, all ones.
fn alone_with(policy: Policy, count: usize) -> (Vec<Server>, JobUrl, Job, Vec<Table>) {
    let (servers, url) = start_servers(&JobConfig { policy, ..JobConfig::new("test", 1, 1) }, 1);
    let job = join(&url, 0);
    let tables = create(&job, count);
    job.start().unwrap();
    (servers, url, job, tables)
}

fn create(job: &Job, count: usize) -> Vec<Table> {
    (0..count)
        .map(|at| job.table(TableSpec::dense(format!("t{at}"), [2, 2]), vec![1.0; 4]).unwrap())
        .collect()
}

fn read(table: &Table) -> Vec<f32> {
    table.read(<[f32]>::to_vec).unwrap()
}

fn sentence<T: std::fmt::Debug>(outcome: Result<T, ClientError>) -> String {
    outcome.unwrap_err().to_string()
}

fn end(job: &Job, servers: Vec<Server>) {
    job.close().unwrap();
    servers.into_iter().for_each(|server| server.join().unwrap());
}

const MANY: usize = 1000;
const STEPS: usize = 6;

/// Pseudo-random values, so that the order of additions shows.
fn values(table: usize, len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|at| ((at * 31 + table * 17 + seed * 101) % 997) as f32 / 311.0 - 1.6).collect()
}

/// Many small tables, a large one among them, and one of rows.
fn model(alone: bool) -> Vec<TableSpec> {
    let mut specs: Vec<TableSpec> =
        (0..MANY).map(|at| TableSpec::dense(format!("small.{at}"), [100])).collect();
    specs.insert(MANY / 2, TableSpec::dense("large", [300, 100]));
    specs.insert(3, TableSpec::sparse("rows", 10, 4));
    if alone { specs.into_iter().map(TableSpec::alone).collect() } else { specs }
}

/// The final parameters of two workers.
fn train(alone: bool, policy: &Policy) -> Vec<Vec<f32>> {
    let config = JobConfig { policy: policy.clone(), ..JobConfig::new("test", 2, 2) };
    let (servers, url) = start_servers(&config, 2);
    let worker = |rank: u32| {
        let job = join(&url, rank);
        let create = |(at, spec): (usize, TableSpec)| {
            let initial = values(at, spec.elements() as usize, 0);
            job.table(spec, initial).unwrap()
        };
        let tables: Vec<Table> = model(alone).into_iter().enumerate().map(create).collect();
        assert!((0..).map(TableId).zip(&tables).all(|(number, table)| table.id() == number));
        job.start().unwrap();
        let packs = job.status().unwrap().packs;
        let names: Vec<usize> = packs.iter().map(|pack| pack.layers.len()).collect();
        assert_eq!(names, if alone { vec![] } else { vec![MANY] });
        for step in 1..=STEPS {
            for (at, table) in tables.iter().enumerate() {
                let gradient = values(at, table.spec().elements() as usize, 2 * step + rank as usize);
                if table.spec().rows {
                    let rows = Gradient::Rows { rows: &[1, 5], values: &gradient[..8] };
                    table.push(rows).unwrap().wait().unwrap();
                } else {
                    table.update(&gradient).unwrap();
                }
            }
            job.clock();
            tables.iter().for_each(|table| table.sync().unwrap());
        }
        let dense = tables.iter().filter(|table| !table.spec().rows);
        let finals: Vec<Vec<f32>> = dense.map(read).collect();
        job.close().unwrap();
        finals
    };
    let [first, second] = std::thread::scope(|scope| {
        let workers = [0, 1].map(|rank| scope.spawn(move || worker(rank)));
        workers.map(|worker| worker.join().unwrap())
    });
    servers.into_iter().for_each(|server| server.join().unwrap());
    assert!(first == second, "replicas differ");
    first
}

#[test]
fn a_thousand_small_tables_train_to_the_same_bits_packed_and_alone() {
    let policy = policy("momentum:lr=0.1,weight_decay=0.01");
    let (packed, alone) = (train(false, &policy), train(true, &policy));
    assert_eq!(packed.len(), MANY + 1);
    assert!(packed[0].iter().zip(values(0, 100, 0)).all(|(after, before)| *after != before));
    for (table, (packed, alone)) in packed.iter().zip(&alone).enumerate() {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(packed), bits(alone), "table {table}");
    }
}

#[test]
fn status_and_globs_know_the_tables_by_their_names() {
    let (servers, url, job, tables) = alone_with(policy("sgd:lr=1"), 8);
    let packs = job.status().unwrap().packs;
    assert_eq!(packs.len(), 1);
    assert_eq!(packs[0].layers, (0..8).map(|at| format!("t{at}")).collect::<Vec<_>>());
    let mut admin = Admin::connect(&url, Duration::from_secs(5)).unwrap();
    let mut set = |table: &str| {
        let change = PolicyOverride::new(table, Policies::of([(Axis::Codec, "f16")]));
        admin.set(change).map_err(|error| error.to_string())
    };
    assert!(set("t3").unwrap_err().contains("`t3` names `t3`, but not"));
    assert_eq!(set("t?").unwrap(), "8 tables now have codec=f16 on all servers");
    for table in &tables {
        table.update(&[0.5; 4]).unwrap();
    }
    job.clock();
    for table in &tables {
        table.sync().unwrap();
        assert_eq!(table.codec().unwrap(), "f16");
        assert_eq!(read(table), [0.5; 4]);
    }
    end(&job, servers);
}

#[test]
fn few_small_tables_and_those_that_are_to_be_alone_stay_as_they_are() {
    let (servers, _, job, tables) = alone_with(policy("sgd:lr=1"), 7);
    assert_eq!(job.status().unwrap().packs, []);
    for table in &tables {
        table.update(&[1.0; 4]).unwrap();
        table.sync().unwrap();
        assert_eq!(read(table), [0.0; 4]);
    }
    end(&job, servers);

    let rule = PolicyOverride::new("*.bias", Policies::of([(Axis::Codec, "f16")]));
    let product = PolicyOverride::new("fc?", Policies::of([(Axis::Codec, "factors")]));
    let (servers, url) = start_servers(
        &JobConfig {
            policy: policy("sgd:lr=1"),
            overrides: vec![rule, product],
            ..JobConfig::new("test", 1, 1)
        },
        1,
    );
    let job = join(&url, 0);
    let own = || Policies::of([(Axis::Optimizer, "sgd:lr=2")]);
    let dense = |name: &str| TableSpec::dense(name, [2, 2]);
    let specs = [
        dense("a"),
        dense("a.bias"),
        TableSpec { policy: own(), ..dense("odd") },
        dense("own").alone(),
        dense("b"),
        dense("fc1"),
        dense("b.bias"),
        dense("c"),
        dense("c.bias"),
        dense("fc2"),
        TableSpec::dense("large", [4097]),
    ];
    let create = |spec: &TableSpec| job.table(spec.clone(), vec![1.0; spec.elements() as usize]).unwrap();
    let tables: Vec<Table> = specs.iter().map(create).collect();
    job.start().unwrap();
    let packs: Vec<Vec<String>> = job.status().unwrap().packs.into_iter().map(|pack| pack.layers).collect();
    assert_eq!(packs, [["a", "b", "c"], ["a.bias", "b.bias", "c.bias"]]);
    let mut slabs = vec![tables[3].slab().unwrap()];
    slabs[0].gradient_mut().fill(1.0);
    let exchange = job.exchange(&mut slabs).unwrap();
    for table in tables.iter().filter(|table| table.spec().name != "own") {
        table.update(&vec![1.0; table.spec().elements() as usize]).unwrap();
    }
    job.clock();
    assert_eq!(exchange.wait().unwrap()[0].values(), [0.0; 4]);
    for table in &tables {
        table.sync().unwrap();
        let after = if table.spec().name == "odd" { -1.0 } else { 0.0 };
        assert!(read(table).iter().all(|value| *value == after), "{}", table.spec().name);
    }
    end(&job, servers);
}

#[test]
fn a_pack_leaves_without_those_who_have_nothing_when_one_is_waited_for() {
    let (servers, _, job, tables) = alone_with(policy("momentum:lr=1,beta=0.5"), 10);
    for table in &tables[..5] {
        table.update(&[1.0; 4]).unwrap();
    }
    assert!(sentence(tables[0].update(&[1.0; 4])).contains("`t0` was pushed at clock 0 already"));
    tables[2].sync().unwrap();
    for (at, table) in tables.iter().enumerate() {
        assert_eq!(read(table), [if at < 5 { 0.0 } else { 1.0 }; 4], "t{at}");
    }
    let why = sentence(tables[7].update(&[1.0; 4]));
    assert!(why.contains("table `t7` is given its gradient too late"), "{why}");
    assert!(why.contains("(`t0`, `t1`, `t2`, `t3`, `t4` and 4 more) have left at clock 0"), "{why}");
    assert!(why.contains("give all gradients before waiting for one, or create the table `alone`"), "{why}");
    assert!(sentence(tables[0].update(&[1.0; 4])).contains("`t0` was pushed at clock 0 already"));
    tables.iter().for_each(|table| table.sync().unwrap());
    job.clock();

    // At the end of the iteration, and by a look at a handle.
    tables[7].update(&[1.0; 4]).unwrap();
    job.clock();
    tables[7].sync().unwrap();
    assert_eq!((read(&tables[7]), read(&tables[8])), (vec![0.0; 4], vec![1.0; 4]));
    let handle = tables[8].push_pull(&[1.0; 4]).unwrap();
    while !handle.is_due() {
        std::thread::yield_now();
    }
    handle.wait().unwrap();
    // Momentum of what had no gradient did not move it.
    assert_eq!(
        (read(&tables[8]), read(&tables[7]), read(&tables[0])),
        (vec![0.0; 4], vec![0.0; 4], vec![0.0; 4])
    );
    assert!(sentence(tables[9].push(&[1.0; 4])).contains("too late"));
    job.clock();

    // What is wrong with one is told at once, and the others go.
    let why = sentence(tables[1].update(&[1.0; 3]));
    assert!(why.contains("table `t1`") && why.contains("4 elements (shape [2, 2])"), "{why}");
    let why = sentence(tables[1].update(&[1.0, f32::NAN, 1.0, 1.0]));
    assert!(why.contains("gradient of table `t1` at clock 3 has NaN"), "{why}");
    let why = sentence(tables[1].push(Gradient::Rows { rows: &[0], values: &[1.0; 2] }));
    assert!(why.contains("table `t1`") && why.contains("as it is dense"), "{why}");
    let why = sentence(tables[1].slab());
    assert!(why.contains("`t1` is not lent as a slab") && why.contains("create it `alone`"), "{why}");
    assert!(sentence(tables[1].rows(&[0])).contains("dense"));
    for table in &tables[1..] {
        table.update(&[1.0; 4]).unwrap();
    }
    // A barrier: others may wait for these before they come.
    job.barrier("here").unwrap();
    assert!(sentence(tables[0].update(&[1.0; 4])).contains("too late"));
    tables.iter().for_each(|table| table.sync().unwrap());
    assert_eq!(read(&tables[9]), [0.0; 4]);
    end(&job, servers);
}

#[test]
fn pulls_bring_each_table_its_part_and_are_shared() {
    let (servers, _, job, tables) = alone_with(policy("sgd:lr=1"), 16);
    let pulled = || job.report().bytes_pulled;
    let of_pack = 16 * 4 * 4;
    let before = pulled();
    let handles: Vec<Handle> = tables.iter().map(|table| table.pull().unwrap()).collect();
    handles.iter().for_each(|handle| handle.wait().unwrap());
    assert_eq!(pulled() - before, of_pack);
    // After the gradient that was given, though it has not left; and what is there now.
    let before = pulled();
    let gradient = |at: usize| [at as f32; 4];
    let mut handles = Vec::new();
    for (at, table) in tables.iter().enumerate().take(9) {
        handles.push(table.push(&gradient(at)).unwrap());
        handles.push(table.pull().unwrap());
    }
    let now: Vec<Handle<Vec<f32>>> = tables[..9].iter().map(|table| table.pull_now().unwrap()).collect();
    handles.iter().for_each(|handle| handle.wait().unwrap());
    for (at, handle) in now.iter().enumerate() {
        assert_eq!(handle.wait().unwrap(), [1.0 - at as f32; 4]);
    }
    assert_eq!(pulled() - before, 2 * of_pack);
    let held = tables[5].values().unwrap();
    assert_eq!((&*held, read(&tables[12])), (&[-4.0; 4][..], vec![1.0; 4]));
    job.clock();
    for (at, table) in tables.iter().enumerate() {
        drop(table.push_pull(&gradient(at)).unwrap());
    }
    // One that asks without a gradient to give.
    tables[0].pull().unwrap().wait().unwrap();
    assert_eq!((&*held, read(&tables[5])), (&[-4.0; 4][..], vec![-9.0; 4]));
    assert_eq!(tables[15].pull_now().unwrap().wait().unwrap(), [-14.0; 4]);
    end(&job, servers);
}

#[test]
fn each_table_hears_once_that_the_push_failed() {
    // What is not sent of the first gradient and the second do not fit a float.
    let (servers, _, job, tables) = alone_with(policy("sgd:lr=0.1").with(Axis::Codec, "topk:0.5"), 8);
    for table in &tables {
        table.update(&[f32::MAX; 4]).unwrap();
    }
    job.clock();
    tables.iter().for_each(|table| table.sync().unwrap());
    for table in &tables[1..] {
        table.update(&[f32::MAX; 4]).unwrap();
    }
    job.clock();
    // It had no gradient in it.
    tables[0].sync().unwrap();
    for table in &tables[1..] {
        let why = sentence(table.sync());
        assert!(why.contains("table `t0 and 7 more`"), "{why}");
        table.sync().unwrap();
    }
    job.abandon();
    drop(servers);
}

#[test]
fn a_worker_without_some_gradients_and_one_that_comes_anew_have_the_same_packs() {
    let config = JobConfig { policy: policy("sgd:lr=1"), ..JobConfig::new("test", 2, 1) };
    let (servers, url) = start_servers(&config, 2);
    let jobs = [0, 1].map(|rank| join(&url, rank));
    let tables = [0, 1].map(|rank| create(&jobs[rank], 9));
    std::thread::scope(|scope| jobs.iter().for_each(|job| drop(scope.spawn(|| job.start().unwrap()))));
    for (rank, tables) in tables.iter().enumerate() {
        for (at, table) in tables.iter().enumerate().filter(|(at, _)| rank == 0 || at % 2 == 0) {
            table.update(&[(at + 1) as f32; 4]).unwrap();
        }
        jobs[rank].clock();
    }
    for (at, table) in tables.iter().flat_map(|tables| tables.iter().enumerate()) {
        table.sync().unwrap();
        let mean = if at % 2 == 0 { (at + 1) as f32 } else { (at + 1) as f32 / 2.0 };
        assert_eq!((table.spec().name.clone(), read(table)), (format!("t{at}"), vec![1.0 - mean; 4]));
    }
    // The packs are those of the policies that the job began with.
    let mut admin = Admin::connect(&url, Duration::from_secs(5)).unwrap();
    let change = |table: &str| PolicyOverride::new(table, Policies::of([(Axis::Codec, "bf16")]));
    assert_eq!(admin.set(change("*")).unwrap(), "9 tables now have codec=bf16 on all servers");
    let [first, second] = jobs;
    second.abandon();
    let second = join(&url, 1);
    let anew = create(&second, 9);
    second.start().unwrap();
    assert_eq!((anew[3].codec().unwrap(), read(&anew[3])), ("bf16".to_owned(), read(&tables[0][3])));
    assert_eq!(second.status().unwrap().packs.len(), 1);
    second.close().unwrap();
    end(&first, servers);
}

/// One worker waits for a small table first, and the other for a large one: what was given to small ones has to leave.
#[test]
fn a_wait_for_any_table_lets_packs_leave() {
    let config = JobConfig { policy: policy("sgd:lr=1"), ..JobConfig::new("test", 2, 1) };
    let (servers, url) = start_servers(&config, 1);
    let worker = |rank: u32| {
        let job = join(&url, rank);
        let small = create(&job, 9);
        let large = job.table(TableSpec::dense("large", [9000]), vec![1.0; 9000]).unwrap();
        job.start().unwrap();
        if rank == 0 {
            small[0].update(&[1.0; 4]).unwrap();
            large.push_pull(&[1.0; 9000]).unwrap().wait().unwrap();
            small[0].sync().unwrap();
        } else {
            small[0].push_pull(&[3.0; 4]).unwrap().wait().unwrap();
            large.push_pull(&[3.0; 9000]).unwrap().wait().unwrap();
        }
        let found = (read(&small[0]), read(&large)[0], read(&small[1])[0]);
        job.close().unwrap();
        found
    };
    let found = std::thread::scope(|scope| {
        let workers = [0, 1].map(|rank| scope.spawn(move || worker(rank)));
        workers.map(|worker| worker.join().unwrap())
    });
    assert_eq!(found, [0, 1].map(|_| (vec![-1.0; 4], -1.0, 1.0)));
    servers.into_iter().for_each(|server| server.join().unwrap());
}
