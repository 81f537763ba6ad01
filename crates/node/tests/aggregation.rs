//! Aggregators over real threads and sockets: the same parameters, with fewer bytes through the servers.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policy};
use paramill_core::registry::Registry;
use paramill_core::status::Status;
use paramill_core::table::TableSpec;
use paramill_core::types::AggregatorId;
use paramill_core::worker::Gradient;
use paramill_node::aggregator::{self, Aggregator, AggregatorConfig};
use paramill_node::client::{ClientError, Job, JobOptions};
use paramill_node::server::{self, Server, ServerConfig};
use paramill_node::{Hub, Transport};
use std::sync::Arc;
use std::time::Duration;

const ELEMENTS: usize = 50_000;
const STEPS: u32 = 8;

fn job_config(workers: u32, codec: &str) -> JobConfig {
    let policy = Policy::default()
        .with(Axis::Optimizer, "sgd:lr=1")
        .with(Axis::Reduce, "sum")
        .with(Axis::Codec, codec)
        .with(Axis::AnswerCodec, codec);
    let policy = policy.with(Axis::Placement, "uniform");
    JobConfig { policy, ..JobConfig::new("test", workers, 2) }
}

/// A job's servers and aggregators, over TCP or in memory.
struct Cluster {
    servers: Vec<Server>,
    aggregators: Vec<Aggregator>,
    hub: Option<Hub>,
    transport: Transport,
}

impl Cluster {
    fn start(workers: u32, aggregators: u32, transport: Transport, hub: Option<Hub>) -> Cluster {
        Cluster::with(aggregators, 1, transport, hub, job_config(workers, "none"))
    }

    fn with(
        aggregators: u32,
        aggregator_cores: u32,
        transport: Transport,
        hub: Option<Hub>,
        job: JobConfig,
    ) -> Cluster {
        let registry = Arc::new(Registry::builtin());
        let base = ServerConfig {
            memory: hub.clone(),
            cores: 2,
            transport,
            ..ServerConfig::new("test", "127.0.0.1:0")
        };
        let first = ServerConfig { coordinate: Some(job), ..base.clone() };
        let first = server::start(first, &registry).unwrap();
        let coordinator = first.coordinator().to_owned();
        let second = ServerConfig { coordinator: coordinator.clone(), ..base };
        let second = server::start(second, &registry).unwrap();
        let aggregators = (0..aggregators).map(|number| {
            let listen = if hub.is_some() { format!("aggregator {number}") } else { "127.0.0.1:0".into() };
            let config = AggregatorConfig {
                id: Some(AggregatorId(number)),
                cores: aggregator_cores,
                memory: hub.clone(),
                transport,
                ..AggregatorConfig::new("test", &coordinator, listen)
            };
            aggregator::start(config, &registry).unwrap()
        });
        Cluster { servers: vec![first, second], aggregators: aggregators.collect(), hub, transport }
    }

    /// Two workers to an aggregator, by rank.
    fn options(&self, rank: u32) -> JobOptions {
        let options = match &self.hub {
            Some(hub) => JobOptions::in_memory(hub, "test"),
            None => {
                let url = format!("paramill://{}/test", self.servers[0].coordinator());
                JobOptions::at(url.parse().unwrap())
            }
        };
        let aggregator = self.aggregators.get(rank as usize / 2).map(|found| found.address().to_owned());
        let options =
            options.rank(rank).transport(self.transport).timeout(Duration::from_secs(30)).log(|_, _| {});
        match aggregator {
            Some(address) => options.aggregator(address),
            None => options,
        }
    }

    fn join(self) {
        for server in self.servers {
            server.join().unwrap();
        }
        for aggregator in self.aggregators {
            aggregator.join().unwrap();
        }
    }
}

/// Whole numbers: their sum is exact in any order.
fn gradient(rank: u32, step: u32) -> Vec<f32> {
    (0..ELEMENTS as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(rank * 31 + step) % 16) as f32)
        .collect()
}

/// The status, once everything that was pushed has been reported: nodes do so twice a second.
fn reported(job: &Job) -> Result<Status, ClientError> {
    loop {
        let before = job.status()?;
        std::thread::sleep(Duration::from_millis(700));
        let status = job.status()?;
        let gradients = |status: &Status| -> Vec<u64> {
            status.aggregators.iter().map(|aggregator| aggregator.report.gradients).collect()
        };
        if gradients(&status) == gradients(&before) && gradients(&status).iter().all(|&sum| sum > 0) {
            return Ok(status);
        }
    }
}

/// One worker's part; it dies without a word after `dies_after` steps.
fn work(
    rank: u32,
    options: JobOptions,
    dies_after: Option<u32>,
) -> Result<(Vec<f32>, Option<Status>), ClientError> {
    let job = Job::init(options)?;
    let table = job.table(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS])?;
    job.start()?;
    for step in 0..dies_after.unwrap_or(STEPS) {
        table.update(&gradient(rank, step))?;
        job.clock();
        table.sync()?;
    }
    let values = table.read(<[f32]>::to_vec)?;
    if dies_after.is_some() {
        return Ok((values, None));
    }
    let status = if rank == 0 { Some(reported(&job)?) } else { None };
    job.close()?;
    Ok((values, status))
}

/// All workers' final parameters, and the status at the end.
fn train(cluster: &Cluster, workers: u32, dies: Option<(u32, u32)>) -> (Vec<Vec<f32>>, Status) {
    let ends: Vec<_> = std::thread::scope(|scope| {
        let start = |rank: u32| {
            let options = cluster.options(rank);
            let dies_after = dies.filter(|(who, _)| *who == rank).map(|(_, step)| step);
            scope.spawn(move || work(rank, options, dies_after).unwrap())
        };
        let workers: Vec<_> = (0..workers).map(start).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    let status = ends.iter().find_map(|(_, status)| status.clone()).unwrap();
    (ends.into_iter().map(|(values, _)| values).collect(), status)
}

/// What `workers` push in `steps`, summed up and subtracted.
fn expected(who: &[(u32, u32)]) -> Vec<f32> {
    let mut values = vec![0.0; ELEMENTS];
    for &(rank, steps) in who {
        for step in 0..steps {
            values.iter_mut().zip(gradient(rank, step)).for_each(|(value, g)| *value -= g);
        }
    }
    values
}

#[test]
fn two_groups_of_two_end_where_four_workers_do() {
    let everybody: Vec<(u32, u32)> = (0..4).map(|rank| (rank, STEPS)).collect();
    let ways = [(Transport::Tcp, None), (Transport::Shm, None), (Transport::Auto, Some(Hub::new()))];
    for (transport, hub) in ways {
        let cluster = Cluster::start(4, 2, transport, hub);
        let (values, status) = train(&cluster, 4, None);
        let expected = expected(&everybody);
        for (rank, values) in values.iter().enumerate() {
            assert!(*values == expected, "worker {rank} ends with other parameters");
        }
        assert_eq!(status.aggregators.len(), 2);
        assert!(status.aggregators.iter().all(|aggregator| aggregator.connected));
        // Half of it when nobody is late; how late somebody is, is the machine's business.
        let pushed: u64 = status.shards.iter().map(|shard| shard.bytes_pushed).sum();
        assert!(pushed < ELEMENTS as u64 * 4 * u64::from(STEPS) * 4, "{pushed} bytes");
        cluster.join();
    }
}

/// Two servers of two cores: each core of an aggregator stands for one or two of the shards.
#[test]
fn aggregators_of_several_cores_end_where_others_do() {
    let everybody: Vec<(u32, u32)> = (0..4).map(|rank| (rank, STEPS)).collect();
    let ways = [(Transport::Tcp, None), (Transport::Shm, None), (Transport::Auto, Some(Hub::new()))];
    for (transport, hub) in ways {
        let cluster = Cluster::with(2, 3, transport, hub, job_config(4, "none"));
        assert_eq!(cluster.aggregators[0].address().split('+').count(), 3);
        let (values, status) = train(&cluster, 4, None);
        assert!(values.iter().all(|values| *values == expected(&everybody)), "{transport:?}");
        let busy = status.aggregators.iter().filter(|core| core.report.groups > 0).count();
        assert_eq!((status.aggregators.len(), busy), (6, 6), "each core is one of the job's");
        cluster.join();
    }
}

const ROWS: u32 = 20_000;

/// The rows that a worker touches in a step.
fn touched(rank: u32, step: u32) -> Vec<u32> {
    (0..ROWS).filter(|row| (row * 7 + rank * 3 + step) % 11 < 3).collect()
}

/// One worker's part with a table of rows. What it read of the rows that it pushed last, when everybody had.
fn work_on_rows(rank: u32, options: JobOptions) -> Result<(Vec<f32>, Option<Status>), ClientError> {
    let job = Job::init(options)?;
    let table = job.table(TableSpec::sparse("rows", ROWS.into(), 2), vec![0.0; 2 * ROWS as usize])?;
    job.start()?;
    for step in 0..STEPS {
        let rows = touched(rank, step);
        let values: Vec<f32> =
            rows.iter().flat_map(|&row| [(row % 9) as f32, (rank + step) as f32]).collect();
        table.push(Gradient::Rows { rows: &rows, values: &values })?.wait()?;
        job.clock();
        table.rows(&touched(rank, step + 1))?.wait()?;
    }
    let values = table.rows(&(0..ROWS).collect::<Vec<_>>())?.wait()?;
    let status = if rank == 0 { Some(reported(&job)?) } else { None };
    job.close()?;
    Ok((values, status))
}

#[test]
fn tables_of_rows_are_added_up() {
    let mut expected = vec![0.0; 2 * ROWS as usize];
    for (rank, step) in (0..4).flat_map(|rank| (0..STEPS).map(move |step| (rank, step))) {
        for row in touched(rank, step) {
            expected[2 * row as usize] -= (row % 9) as f32;
            expected[2 * row as usize + 1] -= (rank + step) as f32;
        }
    }
    for (transport, cores, codec) in
        [(Transport::Tcp, 1, "none"), (Transport::Shm, 2, "none"), (Transport::Tcp, 1, "lossless+zstd")]
    {
        let cluster = Cluster::with(2, cores, transport, None, job_config(4, codec));
        let ends: Vec<_> = std::thread::scope(|scope| {
            let start = |rank| {
                let options = cluster.options(rank);
                scope.spawn(move || work_on_rows(rank, options).unwrap())
            };
            let workers: Vec<_> = (0..4).map(start).collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).collect()
        });
        for (rank, (values, _)) in ends.iter().enumerate() {
            assert!(
                *values == expected,
                "worker {rank} ends with other parameters by {transport:?} and {codec}"
            );
        }
        let status = ends[0].1.as_ref().unwrap();
        let gradients: u64 = status.aggregators.iter().map(|it| it.report.gradients).sum();
        assert_eq!(gradients, 4 * u64::from(STEPS) * 4, "every push is in a sum on each of four shards");
        cluster.join();
    }
}

#[test]
fn a_member_that_dies_in_mid_run_does_not_stop_its_group() {
    let cluster = Cluster::start(4, 2, Transport::Tcp, None);
    let (values, status) = train(&cluster, 4, Some((3, 3)));
    let expected = expected(&[(0, STEPS), (1, STEPS), (2, STEPS), (3, 3)]);
    for (rank, values) in values[..3].iter().enumerate() {
        assert!(*values == expected, "worker {rank} ends with other parameters");
    }
    assert!(status.phase.contains("1 declared dead"), "{}", status.phase);
    cluster.join();
}

/// What a codec made of gradients is added up, encoded again and decoded: not a bit differs, and less travels.
#[test]
fn compressed_sums_and_answers_end_where_plain_ones_do_though_a_member_dies() {
    for transport in [Transport::Tcp, Transport::Shm] {
        let cluster = Cluster::with(2, 1, transport, None, job_config(4, "lossless+zstd"));
        let (values, status) = train(&cluster, 4, Some((3, 3)));
        let expected = expected(&[(0, STEPS), (1, STEPS), (2, STEPS), (3, 3)]);
        for (rank, values) in values[..3].iter().enumerate() {
            assert!(*values == expected, "worker {rank} ends with other parameters");
        }
        for aggregator in &status.aggregators {
            let report = &aggregator.report;
            let plain = ELEMENTS as u64 * 4 * u64::from(STEPS);
            assert!(report.bytes_from_servers * 2 < plain * 2, "{report:?}");
            assert!(report.bytes_from_workers * 2 < plain * 2, "{report:?}");
        }
        cluster.join();
    }
}

/// Each version comes to an aggregator once, and from there to everybody behind it.
#[test]
fn versions_that_are_broadcast_come_through_aggregators_once() {
    let everybody: Vec<(u32, u32)> = (0..5).map(|rank| (rank, STEPS)).collect();
    let ways = [(Transport::Tcp, None), (Transport::Shm, None), (Transport::Auto, Some(Hub::new()))];
    for ((transport, hub), codec) in ways.into_iter().zip(["none", "lossless+zstd", "none"]) {
        let mut job = job_config(5, codec);
        job.policy = job.policy.with(Axis::Broadcast, "chain");
        let cluster = Cluster::with(2, 2, transport, hub, job);
        // The last worker goes to the servers itself.
        let (values, status) = train(&cluster, 5, None);
        let expected = expected(&everybody);
        for (rank, values) in values.iter().enumerate() {
            assert!(*values == expected, "worker {rank} ends with other parameters");
        }
        for aggregator in &status.aggregators {
            let report = &aggregator.report;
            // Who follows a stream after its first version gets all values once; how late somebody is, is the machine's business.
            let surplus = report.bytes_to_workers.abs_diff(report.bytes_from_servers * 2);
            assert!(surplus <= 3 * 4 * ELEMENTS as u64, "{report:?}");
            assert!(report.memory_bytes > 0 && report.groups > 0, "{report:?}");
        }
        cluster.join();
    }
}

#[test]
fn some_go_through_an_aggregator_and_some_do_not() {
    let everybody: Vec<(u32, u32)> = (0..3).map(|rank| (rank, STEPS)).collect();
    let cluster = Cluster::start(3, 1, Transport::Auto, None);
    let (values, _) = train(&cluster, 3, None);
    let expected = expected(&everybody);
    assert!(values.iter().all(|values| *values == expected));
    cluster.join();
}
