//! Workers whose connections are spread over several loops: the same bits as with one, and one end for all of them.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::coordinator::JobConfig;
use paramill_core::fault::FaultPlan;
use paramill_core::policy::{Axis, Policy};
use paramill_core::registry::Registry;
use paramill_core::table::TableSpec;
use paramill_node::client::{ClientError, Gradient, Job, JobOptions, Slab};
use paramill_node::server::{self, Server, ServerConfig};
use paramill_node::{Hub, Injection, Log, Transport};
use std::sync::Arc;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(20);
const ELEMENTS: usize = 200_000;
const CORES: u32 = 5;

/// Where a job runs, and how many loops its workers have.
struct Place {
    hub: Option<Hub>,
    transport: Transport,
    loops: Option<usize>,
    /// Of workers.
    faults: FaultPlan,
    server_faults: FaultPlan,
}

impl Place {
    fn over(transport: Transport, loops: usize) -> Place {
        let (faults, server_faults) = (FaultPlan::default(), FaultPlan::default());
        Place { hub: None, transport, loops: Some(loops), faults, server_faults }
    }

    fn start(&self, workers: u32, answer_codec: &str) -> Server {
        let policy = Policy::default()
            .with(Axis::Order, "ranked")
            .with(Axis::Optimizer, "momentum:lr=0.1")
            .with(Axis::AnswerCodec, answer_codec);
        self.start_with(workers, policy)
    }

    fn start_with(&self, workers: u32, policy: Policy) -> Server {
        let config = ServerConfig {
            coordinate: Some(JobConfig { policy, ..JobConfig::new("test", workers, 1) }),
            cores: CORES,
            memory: self.hub.clone(),
            transport: self.transport,
            faults: self.server_faults.clone(),
            log: Log::none(),
            ..ServerConfig::new("test", "127.0.0.1:0")
        };
        server::start(config, &Arc::new(Registry::builtin())).unwrap()
    }

    fn options(&self, server: &Server, rank: u32) -> JobOptions {
        let options = match &self.hub {
            Some(hub) => JobOptions::in_memory(hub, "test"),
            None => JobOptions::at(format!("paramill://{}/test", server.coordinator()).parse().unwrap()),
        };
        let injection = Injection { plan: self.faults.clone(), seed: 0 };
        let options = options.rank(rank).transport(self.transport).inject(injection).timeout(TIMEOUT);
        let options = options.log(|_, _| {});
        match self.loops {
            Some(loops) => options.loops(loops),
            None => options,
        }
    }
}

fn gradient(rank: u32, step: u32) -> Vec<f32> {
    (0..ELEMENTS).map(|i| (i % 103) as f32 / 7.0 - (rank * 3 + step) as f32).collect()
}

/// Trains a table that is copied and another one in slabs on whole numbers, which no addition rounds; every worker's final
/// parameters.
fn train_whole_numbers(place: &Place, answer_codec: &str) -> Vec<Vec<f32>> {
    let workers = 2;
    let policy = Policy::default()
        .with(Axis::Optimizer, "sgd:lr=1")
        .with(Axis::Reduce, "sum")
        .with(Axis::AnswerCodec, answer_codec);
    let server = place.start_with(workers, policy);
    let run = |rank: u32| {
        let job = Job::init(place.options(&server, rank)).unwrap();
        let dense = TableSpec::dense("dense", [ELEMENTS as u64]);
        let copied = job.table(dense.clone(), vec![1.0; ELEMENTS]).unwrap();
        let lent = job.table(TableSpec { name: "lent".into(), ..dense }, vec![2.0; ELEMENTS]).unwrap();
        job.start().unwrap();
        let mut slabs = vec![lent.slab().unwrap()];
        for step in 0..12 {
            let gradient: Vec<f32> = gradient(rank, step).into_iter().map(f32::round).collect();
            slabs[0].gradient_mut().copy_from_slice(&gradient);
            let exchange = job.exchange(&mut slabs).unwrap();
            copied.update(&gradient).unwrap();
            job.clock();
            copied.sync().unwrap();
            slabs = exchange.wait().unwrap();
        }
        let mut finals = copied.read(<[f32]>::to_vec).unwrap();
        finals.extend_from_slice(slabs[0].values());
        drop(slabs);
        job.close().unwrap();
        finals
    };
    let finals = both(&run);
    server.join().unwrap();
    finals
}

/// What two workers, each on its thread, come to.
fn both(run: &(impl Fn(u32) -> Vec<f32> + Sync)) -> Vec<Vec<f32>> {
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2).map(|rank| scope.spawn(move || run(rank))).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    })
}

/// Trains a table that is copied, another one in slabs and one of rows; every worker's final parameters.
fn train(place: &Place, answer_codec: &str) -> Vec<Vec<f32>> {
    let workers = 2;
    let server = place.start(workers, answer_codec);
    let run = |rank: u32| {
        let job = Job::init(place.options(&server, rank)).unwrap();
        let dense = TableSpec::dense("dense", [ELEMENTS as u64]);
        let copied = job.table(dense.clone(), vec![1.0; ELEMENTS]).unwrap();
        let lent = job.table(TableSpec { name: "lent".into(), ..dense }, vec![2.0; ELEMENTS]).unwrap();
        let rows = job.table(TableSpec::sparse("rows", 100_000, 2), vec![3.0; ELEMENTS]).unwrap();
        job.start().unwrap();
        let mut slabs = vec![lent.slab().unwrap()];
        let mut pulled = Vec::new();
        for step in 0..6 {
            slabs[0].gradient_mut().copy_from_slice(&gradient(rank, step));
            let exchange = job.exchange(&mut slabs).unwrap();
            copied.update(&gradient(rank, step + 9)).unwrap();
            let some = Gradient::Rows { rows: &[1, 50_000, 99_999], values: &gradient(rank, step)[..6] };
            let pushed = rows.push(some).unwrap();
            job.clock();
            copied.sync().unwrap();
            pushed.wait().unwrap();
            slabs = exchange.wait().unwrap();
            pulled = rows.rows(&[1, 50_000, 99_999]).unwrap().wait().unwrap();
        }
        let mut finals = copied.read(<[f32]>::to_vec).unwrap();
        finals.extend_from_slice(slabs[0].values());
        finals.extend(pulled);
        drop(slabs);
        job.close().unwrap();
        finals
    };
    let finals = both(&run);
    server.join().unwrap();
    finals
}

#[test]
fn any_number_of_loops_gives_the_same_bits_over_every_transport() {
    let expected = train(&Place::over(Transport::Tcp, 1), "none");
    assert_eq!(expected[0], expected[1]);
    let memory = Place { hub: Some(Hub::new()), ..Place::over(Transport::Auto, 3) };
    let default = Place { loops: None, ..Place::over(Transport::Tcp, 1) };
    let places =
        [Place::over(Transport::Tcp, 3), Place::over(Transport::Tcp, 9), Place::over(Transport::Shm, 4)];
    for place in places.into_iter().chain([memory, default]) {
        assert!(train(&place, "none") == expected, "{:?} with {:?} loops", place.transport, place.loops);
    }
}

#[test]
fn answers_that_have_to_be_decoded_are_the_same_with_several_loops() {
    for codec in ["f16", "int8", "lossless+zstd"] {
        let expected = train(&Place::over(Transport::Tcp, 1), codec);
        for place in [Place::over(Transport::Tcp, 3), Place::over(Transport::Shm, 4)] {
            assert!(train(&place, codec) == expected, "{codec} over {:?}", place.transport);
        }
    }
}

/// Differences of whole numbers that are sent whole lose nothing: the parameters are those of answers without a codec if, and
/// only if, each of them is added once, and in its turn.
#[test]
fn differences_are_added_once_by_whichever_loop_receives_them() {
    let expected = train_whole_numbers(&Place::over(Transport::Tcp, 1), "none");
    assert_eq!(expected[0], expected[1]);
    let memory = Place { hub: Some(Hub::new()), ..Place::over(Transport::Auto, 3) };
    let faults = FaultPlan::parse(&["link:reset,p=0.01"]).unwrap();
    let broken = Place { faults, ..Place::over(Transport::Tcp, 3) };
    let places =
        [Place::over(Transport::Tcp, 1), Place::over(Transport::Tcp, 4), Place::over(Transport::Shm, 4)];
    for place in places.into_iter().chain([memory, broken]) {
        let found = train_whole_numbers(&place, "topk:1");
        assert!(found == expected, "{:?} with {:?} loops", place.transport, place.loops);
    }
}

#[test]
fn connections_of_all_loops_are_made_anew_when_they_break() {
    let expected = train(&Place::over(Transport::Tcp, 1), "none");
    let faults = FaultPlan::parse(&["link:reset,p=0.01"]).unwrap();
    let broken = Place { faults, ..Place::over(Transport::Tcp, 3) };
    assert!(train(&broken, "none") == expected);
}

/// Readers and an application that gives exchanges up work while answers are received.
#[test]
fn an_exchange_that_is_given_up_while_its_answer_comes_leaves_everything_usable() {
    let place = Place::over(Transport::Tcp, 4);
    let server = place.start(1, "none");
    let job = Job::init(place.options(&server, 0)).unwrap();
    let table = job.table(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS]).unwrap();
    job.start().unwrap();
    let mut slabs: Vec<Slab> = vec![table.slab().unwrap()];
    for step in 0..40u64 {
        slabs[0].gradient_mut().fill(1.0);
        let exchange = job.exchange(&mut slabs).unwrap();
        job.clock();
        if step % 2 == 0 {
            std::thread::sleep(Duration::from_micros(50 * step));
            slabs = exchange.give_up();
            // What had not arrived is what was there before, or newer: nothing else.
            assert!(slabs[0].values().iter().all(|value| value.is_finite() && *value <= 0.0));
        } else {
            slabs = exchange.wait().unwrap();
            let first = slabs[0].values()[0];
            assert!(first < 0.0 && slabs[0].values().iter().all(|value| *value == first), "step {step}");
        }
    }
    drop(slabs);
    job.close().unwrap();
    server.join().unwrap();
}

/// Late answers are received while the application computes with a slab that it has back.
#[test]
fn an_exchange_that_goes_on_without_late_blocks_leaves_their_last_values() {
    const STEPS: usize = 150;
    /// Elements of a chunk, which is of one version.
    const CHUNK: usize = 8192;
    let late = |place: Place| {
        let server_faults = FaultPlan::parse(&["pull:delay=3ms,p=0.2"]).unwrap();
        Place { server_faults, ..place }
    };
    let memory = Place { hub: Some(Hub::new()), ..Place::over(Transport::Auto, 3) };
    let places =
        [Place::over(Transport::Tcp, 1), Place::over(Transport::Tcp, 4), Place::over(Transport::Shm, 4)];
    for place in places.into_iter().chain([memory]).map(late) {
        let policy = Policy::default().with(Axis::Sync, "psp:c=1,b=0.5").with(Axis::Optimizer, "sgd:lr=1");
        let server = place.start_with(1, policy);
        let job = Job::init(place.options(&server, 0)).unwrap();
        let table = job.table(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS]).unwrap();
        job.start().unwrap();
        let mut slabs: Vec<Slab> = vec![table.slab().unwrap()];
        let address = slabs[0].values().as_ptr();
        let mut old_blocks = 0;
        for step in 1..=STEPS {
            slabs[0].gradient_mut().fill(1.0);
            let exchange = job.exchange(&mut slabs).unwrap();
            job.clock();
            slabs = exchange.wait().unwrap();
            let values = slabs[0].values().to_vec();
            let is_newest = |chunk: &[f32]| chunk[0] == -(step as f32);
            assert!(values.chunks(CHUNK).all(|chunk| chunk.iter().all(|value| *value == chunk[0])));
            assert!(values.chunks(CHUNK).any(is_newest), "step {step}");
            old_blocks += values.chunks(CHUNK).filter(|chunk| !is_newest(chunk)).count();
            // It computes: late answers come meanwhile.
            for _ in 0..3 {
                std::thread::sleep(Duration::from_micros(200));
                assert!(slabs[0].values() == values, "step {step} over {:?}", place.transport);
            }
        }
        assert_eq!(slabs[0].values().as_ptr(), address, "its memory stays where it is");
        assert!(old_blocks > 0, "something was late over {:?}", place.transport);
        drop(slabs);
        table.pull_now().unwrap().wait().unwrap();
        let is_all = |values: &[f32]| values.iter().all(|value| *value == -(STEPS as f32));
        assert!(table.read(is_all).unwrap(), "no gradient was lost over {:?}", place.transport);
        job.close().unwrap();
        server.join().unwrap();
    }
}

#[test]
fn a_crash_ends_all_loops_and_says_why() {
    let place = Place {
        faults: FaultPlan::parse(&["worker=0:crash@200ms"]).unwrap(),
        ..Place::over(Transport::Tcp, 3)
    };
    let server = place.start(1, "none");
    let job = Job::init(place.options(&server, 0)).unwrap();
    let table = job.table(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS]).unwrap();
    let error = match job.start() {
        Err(error) => error,
        Ok(()) => loop {
            if let Err(error) = table.pull().and_then(|pull| pull.wait()) {
                break error;
            }
        },
    };
    assert!(matches!(&error, ClientError::Ended(why) if why.contains("crashed, as injected")), "{error}");
    // All threads end: this waits for them.
    job.abandon();
    drop(server);
}

#[test]
fn a_number_of_loops_that_cannot_be_is_refused_with_a_sentence() {
    let place = Place::over(Transport::Tcp, 0);
    let server = place.start(1, "none");
    for loops in [0, 65] {
        let options = place.options(&server, 0).loops(loops);
        let error = Job::init(options).unwrap_err().to_string();
        assert!(error.contains(&format!("{loops} loops")) && error.contains("from 1 to 64"), "{error}");
    }
}
