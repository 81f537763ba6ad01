//! A scenario over loopback TCP: the same roles, tables, gradients and faults, driven by sockets and the real clock.

use crate::failure::Failure;
use crate::output::{self, Align, Output};
use anyhow::{Context, Result, anyhow};
use paramill_core::consistency::SyncStats;
use paramill_core::registry::Registry;
use paramill_core::types::{AggregatorId, ServerId, TableId, Time, WorkerId};
use paramill_core::wire::Control;
use paramill_node::Injection;
use paramill_node::admin::Admin;
use paramill_node::aggregator::{self, Aggregator, AggregatorConfig};
use paramill_node::client::{Gradient, Handle, Job, JobOptions, Table};
use paramill_node::server::{self, Server, ServerConfig};
use paramill_node::url::JobUrl;
use paramill_sim::compute::{ComputeClock, SendMode, Stage};
use paramill_sim::gradient::{PushId, touched_rows};
use paramill_sim::judge::CONDITION;
use paramill_sim::report::{TableOutcome, parameter_hash};
use paramill_sim::scenario::Scenario;
use serde::Serialize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const JOB: &str = "scenario";
/// The end of a job waits for the slowest worker.
const END_TIMEOUT: Duration = Duration::from_secs(3600);

/// How long the coordinator may take for an answer.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(10);

/// How it ended.
#[derive(Serialize)]
struct SocketReport {
    seed: u64,
    seconds: f64,
    tables: Vec<TableOutcome>,
    sync: SyncStats,
}

/// What rank 0 finds out at the end.
struct End {
    tables: Vec<TableOutcome>,
    sync: SyncStats,
}

pub(super) fn run(scenario: &Scenario, output: &Output) -> Result<(), Failure> {
    if scenario.policy.is_local() {
        let why =
            "local: over sockets the workers of a scenario synchronise at every step; leave out --sockets";
        return Err(Failure::Usage(anyhow!(why)));
    }
    let registry = Arc::new(Registry::builtin());
    let servers = start_servers(scenario, &registry)?;
    let url = JobUrl { address: servers[0].coordinator().to_owned(), job: JOB.into() };
    let aggregators = start_aggregators(scenario, &url, &registry)?;
    let began = Instant::now();
    let aggregator_of = |rank| {
        let aggregator: Option<AggregatorId> = scenario.aggregator_of(rank);
        aggregator.map(|id| aggregators[id.0 as usize].address().to_owned())
    };
    let end = work_all(scenario, &url, &registry, aggregator_of)?;
    let seconds = began.elapsed().as_secs_f64();
    for server in servers {
        server.join().map_err(|error| anyhow!("a server failed: {error}"))?;
    }
    for aggregator in aggregators {
        aggregator.join().map_err(|error| anyhow!("an aggregator failed: {error}"))?;
    }
    let End { tables, sync } = end.context("worker 0 saw no end")?;
    print(&SocketReport { seed: scenario.seed, seconds, tables, sync }, output)
}

/// Runs all workers, and whoever gives orders. The first that fails ends the run: its threads are left to themselves,
/// since those of the others may wait for it as long as the job lasts, and end with this process.
fn work_all(
    scenario: &Scenario,
    url: &JobUrl,
    registry: &Arc<Registry>,
    aggregator_of: impl Fn(WorkerId) -> Option<String>,
) -> Result<Option<End>> {
    let scenario = Arc::new(scenario.clone());
    let over = Arc::new(AtomicBool::new(false));
    let (results, inbox) = mpsc::channel();
    let start = |name: String, run: Box<dyn FnOnce() -> Result<Option<End>> + Send>| {
        let results = results.clone();
        std::thread::spawn(move || {
            let ran = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(anyhow!("it panicked")));
            // Nobody listens any more after a failure.
            let _ = results.send(ran.context(name));
        });
    };
    for rank in (0..scenario.workers).map(WorkerId) {
        let mut options = JobOptions::at(url.clone()).rank(rank.0).registry(registry.clone());
        if let Some(address) = aggregator_of(rank) {
            options = options.aggregator(address);
        }
        let scenario = scenario.clone();
        start(rank.to_string(), Box::new(move || work(&scenario, rank, options)));
    }
    let (ordered, url, is_over) = (scenario.clone(), url.clone(), over.clone());
    let give = move || give_orders(&ordered, &url, &is_over).map(|()| None);
    start("an order of the scenario".into(), Box::new(give));
    let mut end = None;
    for count in 0..=scenario.workers {
        // One report is missing now. It is that of the thread that gives orders, which has to stop because all workers are
        // done, or that of a worker, and then all orders have been given.
        if count == scenario.workers {
            over.store(true, Ordering::Relaxed);
        }
        end = inbox.recv().context("all threads ended")??.or(end);
    }
    Ok(end)
}

fn start_servers(scenario: &Scenario, registry: &Arc<Registry>) -> Result<Vec<Server>> {
    let base = ServerConfig {
        cores: scenario.cores,
        faults: scenario.fault_plan()?,
        seed: scenario.seed,
        ..ServerConfig::new(JOB, "127.0.0.1:0")
    };
    let first = ServerConfig {
        coordinate: Some(scenario.job_config(JOB)),
        server: Some(ServerId(0)),
        ..base.clone()
    };
    let mut servers = vec![server::start(first, registry)?];
    let coordinator = servers[0].coordinator().to_owned();
    for number in 1..scenario.servers {
        let config =
            ServerConfig { coordinator: coordinator.clone(), server: Some(ServerId(number)), ..base.clone() };
        servers.push(server::start(config, registry)?);
    }
    Ok(servers)
}

fn start_aggregators(scenario: &Scenario, url: &JobUrl, registry: &Arc<Registry>) -> Result<Vec<Aggregator>> {
    let start = |number: u32, above: Option<String>| -> Result<Aggregator> {
        let config = AggregatorConfig {
            id: Some(AggregatorId(number)),
            above,
            cores: scenario.aggregator_cores,
            hold: Duration::from_secs_f64(scenario.hold_ms * 1e-3),
            faults: scenario.fault_plan()?,
            seed: scenario.seed,
            ..AggregatorConfig::new(JOB, &url.address, "127.0.0.1:0")
        };
        Ok(aggregator::start(config, registry)?)
    };
    let racks = (scenario.aggregators..scenario.all_aggregators()).map(|number| start(number, None));
    let racks = racks.collect::<Result<Vec<_>>>()?;
    let address_of = |AggregatorId(rack)| racks[(rack - scenario.aggregators) as usize].address().to_owned();
    let start_below = |number| start(number, scenario.rack_of(AggregatorId(number)).map(address_of));
    let hosts = (0..scenario.aggregators).map(start_below).collect::<Result<Vec<_>>>()?;
    Ok(hosts.into_iter().chain(racks).collect())
}

/// Gives the scenario's orders when it is time, as `paramill set`, `drain` and `status` would.
fn give_orders(scenario: &Scenario, url: &JobUrl, over: &AtomicBool) -> Result<()> {
    let began = Instant::now();
    let is_over_by = |deadline: Instant| {
        while Instant::now() < deadline && !over.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        over.load(Ordering::Relaxed)
    };
    for (at, order) in scenario.orders() {
        if is_over_by(began + at.since(Time::ZERO)) {
            return Ok(());
        }
        let given = Admin::connect(url, ADMIN_TIMEOUT).and_then(|mut admin| match order {
            Control::Set(change) => admin.set(change).map(drop),
            Control::Drain { server } => admin.drain(server).map(drop),
            _ => admin.status().map(drop),
        });
        // The job may have ended a moment ago.
        if let Err(error) = given
            && !is_over_by(Instant::now() + ADMIN_TIMEOUT)
        {
            return Err(error.into());
        }
    }
    Ok(())
}

/// One worker; rank 0 returns the final parameters and what the servers counted.
fn work(scenario: &Scenario, rank: WorkerId, options: JobOptions) -> Result<Option<End>> {
    let faults = scenario.fault_plan()?;
    let options = options.inject(Injection { plan: faults.clone(), seed: scenario.seed });
    let (gradients, seed) = (scenario.gradients(), scenario.seed);
    let mut compute = ComputeClock::new(scenario.compute.clone(), faults, seed, rank);
    let job = Job::init(options)?;
    let (condition, seed) = (scenario.judge.clone(), scenario.seed);
    job.condition(CONDITION, move |asked| {
        std::thread::sleep(condition.takes());
        condition.verdict(seed, &asked.question).ok_or_else(|| "the scenario says so".into())
    })?;
    let mut tables = Vec::new();
    for (id, spec) in (0..).map(TableId).zip(scenario.table_specs()) {
        let initial = (0..spec.elements()).map(|element| gradients.initial(seed, id, element));
        let initial = initial.collect();
        // As in the simulation, which this is compared with.
        tables.push(job.table(spec.alone(), initial)?);
    }
    job.start()?;
    let application = Application { scenario, rank, job: &job, tables: &tables };
    match scenario.compute.send {
        SendMode::Layerwise => application.compute_by_layers(&mut compute)?,
        SendMode::End => application.compute_at_once(&mut compute)?,
    }
    job.barrier_within("done", END_TIMEOUT)?;
    let end = match rank {
        WorkerId(0) => Some(judge(&job, &tables)?),
        _ => None,
    };
    job.close()?;
    Ok(end)
}

/// What a worker of the scenario computes.
struct Application<'a> {
    scenario: &'a Scenario,
    rank: WorkerId,
    job: &'a Job,
    tables: &'a [Table],
}

/// What an iteration has read of a table: rows, where it is a table of rows, and values.
type Read = (Vec<u32>, Vec<f32>);

impl Application<'_> {
    /// All gradients leave after a step, and all parameters are waited for before the next one.
    fn compute_at_once(&self, compute: &mut ComputeClock) -> Result<()> {
        for clock in 0..self.scenario.iterations {
            let read: Vec<Read> =
                self.tables.iter().map(|table| self.fetch(table, clock)).collect::<Result<_>>()?;
            std::thread::sleep(compute.step(clock));
            let pushes = self.tables.iter().zip(&read).map(|(table, read)| self.push(table, clock, read));
            let handles: Vec<Handle> = pushes.collect::<Result<_>>()?;
            self.job.clock();
            handles.iter().try_for_each(Handle::wait)?;
        }
        Ok(())
    }

    /// A table's gradient leaves when its layer's backward is done, and its parameters are waited for when its forward begins.
    fn compute_by_layers(&self, compute: &mut ComputeClock) -> Result<()> {
        let times = self.scenario.layer_times();
        let mut handles: Vec<Option<Handle>> = self.tables.iter().map(|_| None).collect();
        for clock in 0..self.scenario.iterations {
            let step = compute.step(clock);
            let mut read: Vec<Read> = Vec::new();
            for stage in (0..times.stages()).map(|number| times.stage(number)) {
                if let Stage::Forward(layer) = stage {
                    if let Some(handle) = handles[layer].take() {
                        handle.wait()?;
                    }
                    read.push(self.fetch(&self.tables[layer], clock)?);
                }
                std::thread::sleep(times.time(stage, step));
                if let Stage::Backward(layer) = stage {
                    handles[layer] = Some(self.push(&self.tables[layer], clock, &read[layer])?);
                }
            }
            self.job.clock();
        }
        handles.iter().flatten().try_for_each(Handle::wait).map_err(Into::into)
    }

    /// Sends the gradient that follows from what was read of a table.
    fn push(&self, table: &Table, clock: u64, (rows, values): &Read) -> Result<Handle> {
        let (gradients, seed) = (self.scenario.gradients(), self.scenario.seed);
        let push = PushId { seed, worker: self.rank, clock, table: table.id() };
        let mut gradient = Vec::with_capacity(values.len());
        if table.spec().rows {
            gradients.extend_rows(&push, rows, table.spec().row_elements(), values, &mut gradient);
            return Ok(table.push(Gradient::Rows { rows, values: &gradient })?);
        }
        gradients.extend(&push, 0, values, &mut gradient);
        Ok(table.push_pull(&gradient)?)
    }

    /// The values that an iteration works on: a whole dense table, or the touched rows of a sparse one.
    fn fetch(&self, table: &Table, clock: u64) -> Result<Read> {
        if !table.spec().rows {
            return Ok((Vec::new(), table.read(<[f32]>::to_vec)?));
        }
        let rows = touched_rows(self.scenario.seed, self.rank, clock, table.id(), table.spec());
        let values = table.rows(&rows)?.wait()?;
        Ok((rows, values))
    }
}

fn judge(job: &Job, tables: &[Table]) -> Result<End> {
    let mut outcomes = Vec::new();
    for table in tables {
        let values = table.pull_now()?.wait()?;
        outcomes.push(TableOutcome { name: table.spec().name.clone(), hash: parameter_hash(&values) });
    }
    let status = job.status()?;
    let mut sync = SyncStats::default();
    status.shards.iter().flat_map(|shard| &shard.tables).for_each(|table| sync.merge(&table.stats));
    Ok(End { tables: outcomes, sync })
}

fn print(report: &SocketReport, output: &Output) -> Result<(), Failure> {
    if output.json() {
        return Ok(output.object(report)?);
    }
    output.text(format!(
        "seed {}: {:.2} s over sockets; {} of {} pulls delayed",
        report.seed, report.seconds, report.sync.dprs, report.sync.pulls
    ))?;
    let mut table =
        output::Table::new([("table", Align::Left), ("hash of the final parameters", Align::Left)]);
    for outcome in &report.tables {
        table.row([&outcome.name, &outcome.hash]);
    }
    Ok(output.table(&table)?)
}
