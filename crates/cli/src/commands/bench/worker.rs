//! One worker of an exchange: it makes as many iterations as it is told to.

use super::layers::Layers;
use super::plan::Exchange;
use super::task::{Answer, Instruction, answer};
use super::values::Values;
use anyhow::{Context, Result, bail, ensure};
use paramill_core::status::Status;
use paramill_core::store::Buffer;
use paramill_core::table::{Pack, Packed};
use paramill_node::client::{ClientError, Handle, Job, JobOptions, Slab, Table};
use serde::{Deserialize, Serialize};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant, SystemTime};

/// Iteration times that are told; of more, every n-th is.
const MAX_TIMES: usize = 20_000;

/// Iterations that were made.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Ran {
    pub(super) seconds: f64,
    /// Microseconds that iterations took.
    pub(super) times_us: Vec<u32>,
    pub(super) longest_us: u32,
    /// What the worker's frames carried; other contenders do not say.
    #[serde(default)]
    pub(super) payload: Option<Payload>,
    /// When iterations pushed and had what followed, where parameters are broadcast.
    #[serde(default)]
    pub(super) moments: Vec<Moment>,
}

/// Two moments of an iteration, in microseconds since 1970: processes of one host have the same clock.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Moment {
    pub(super) pushed_us: u64,
    pub(super) received_us: u64,
}

/// Bytes that travelled between a worker and the servers, without headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Payload {
    pub(super) pushed: u64,
    pub(super) pulled: u64,
}

impl Payload {
    pub(super) fn zip_with(self, other: Payload, combine: impl Fn(u64, u64) -> u64) -> Payload {
        Payload { pushed: combine(self.pushed, other.pushed), pulled: combine(self.pulled, other.pulled) }
    }
}

/// The model as the worker holds it.
enum Held {
    /// In memory of its own, which is copied.
    Own(Vec<OwnTable>),
    /// In memory that frames leave from and arrive in.
    Lent(Vec<Slab>),
    /// The same, layer by layer.
    Layers(Layers),
}

/// Gradients of a table's tensors, each in memory of its own, and room to gather those of several.
struct OwnTable {
    table: Table,
    tensors: Vec<Buffer>,
    gathered: Buffer,
}

/// Joins, obeys, leaves.
pub(super) fn run(
    exchange: &Exchange,
    rank: u32,
    options: JobOptions,
    instructions: &Receiver<Instruction>,
) -> Result<()> {
    let job = Job::init(options)?;
    let mut values = Values::new(exchange, rank);
    let mut tables = Vec::new();
    for pack in exchange.tables() {
        // What shares a table is the benchmark's own choice.
        let spec = pack.spec().clone().alone();
        let initial = values.initial(spec.elements() as usize);
        tables.push((job.table(spec, initial)?, pack));
    }
    job.start().context("the job did not start")?;
    let mut model = hold(&tables, exchange, &mut values)?;
    if rank == 0 {
        await_copies(&job, exchange)?;
    }
    let held = if rank == 0 { Some(held(&job.status()?, exchange)?) } else { None };
    answer(&Answer::Ready { held })?;
    loop {
        match instructions.recv().context("nobody gives instructions any more")? {
            Instruction::Run { iterations } => {
                let has_moments = exchange.policy.is_broadcast();
                answer(&Answer::Ran(iterate(&job, &mut model, &mut values, iterations, has_moments)?))?;
            }
            Instruction::Leave => break,
            Instruction::Flow { .. } => bail!("a worker was told to send without end"),
        }
    }
    let checksum = checksum(&job, &tables, model, &values)?;
    job.close()?;
    answer(&Answer::Left { checksum })
}

fn hold(tables: &[(Table, Pack)], exchange: &Exchange, values: &mut Values) -> Result<Held> {
    if exchange.copy {
        let own = |(table, pack): &(Table, Pack)| OwnTable::new(table.clone(), pack, values);
        return Ok(Held::Own(tables.iter().map(own).collect()));
    }
    let mut slabs = tables.iter().map(|(table, _)| table.slab()).collect::<Result<Vec<Slab>, _>>()?;
    slabs.iter_mut().for_each(|slab| values.fill(slab.gradient_mut()));
    Ok(match exchange.compute {
        Some(compute) => Held::Layers(Layers::new(exchange, compute, slabs)),
        None => Held::Lent(slabs),
    })
}

fn iterate(
    job: &Job,
    model: &mut Held,
    values: &mut Values,
    iterations: u64,
    has_moments: bool,
) -> Result<Ran> {
    let mut moments = Vec::new();
    let stride = iterations.div_ceil(MAX_TIMES as u64).max(1);
    let mut times_us = Vec::with_capacity((iterations / stride) as usize + 1);
    let mut longest = Duration::ZERO;
    let before = payload(job);
    let mut total = Duration::ZERO;
    let mut last = Instant::now();
    if let Held::Layers(layers) = model {
        layers.begin();
    }
    for iteration in 0..iterations {
        // An application has its gradients from elsewhere: their making is no part of the exchange.
        if model.vary(values) {
            last = Instant::now();
        }
        let pushed = exchange_all(job, model).with_context(|| format!("iteration {iteration}"))?;
        if has_moments && iteration % stride == 0 {
            moments
                .push(Moment { pushed_us: since_1970(pushed), received_us: since_1970(SystemTime::now()) });
        }
        let now = Instant::now();
        let time = now - last;
        last = now;
        total += time;
        longest = longest.max(time);
        if iteration % stride == 0 {
            times_us.push(microseconds(time));
        }
    }
    if let Held::Layers(layers) = model {
        // What follows the last gradients belongs to their iterations.
        layers.await_all()?;
        total += last.elapsed();
    }
    let payload = Some(payload(job).zip_with(before, |after, before| after - before));
    Ok(Ran { seconds: total.as_secs_f64(), times_us, longest_us: microseconds(longest), payload, moments })
}

/// What has travelled so far.
fn payload(job: &Job) -> Payload {
    let report = job.report();
    Payload { pushed: report.bytes_pushed, pulled: report.bytes_pulled }
}

/// One iteration: every tensor leaves, then every tensor is waited for. Returns when the last one was handed over.
fn exchange_all(job: &Job, model: &mut Held) -> Result<SystemTime> {
    let pushed = match model {
        Held::Own(tables) => {
            let push = |own: &mut OwnTable| own.push_pull();
            let handles: Vec<Handle> = tables.iter_mut().map(push).collect::<Result<_, _>>()?;
            job.clock();
            let pushed = SystemTime::now();
            handles.iter().try_for_each(Handle::wait)?;
            pushed
        }
        Held::Lent(slabs) => {
            let exchange = job.exchange(slabs)?;
            job.clock();
            let pushed = SystemTime::now();
            *slabs = exchange.wait()?;
            pushed
        }
        Held::Layers(layers) => {
            layers.step(job)?;
            SystemTime::now()
        }
    };
    Ok(pushed)
}

impl Held {
    /// Changes gradients for the next iteration; returns whether that was needed.
    fn vary(&mut self, values: &mut Values) -> bool {
        match self {
            Held::Own(tables) => {
                let tensors = tables.iter_mut().flat_map(|own| &mut own.tensors);
                values.vary(tensors.map(Buffer::as_mut_slice))
            }
            Held::Lent(slabs) => values.vary(slabs.iter_mut().map(|slab| slab.gradient_mut())),
            // Gradients are made while others are under way: they stay.
            Held::Layers(_) => false,
        }
    }
}

impl OwnTable {
    fn new(table: Table, pack: &Pack, values: &mut Values) -> OwnTable {
        let own = |packed: &Packed| {
            let mut buffer = Buffer::zeroed(packed.place.len());
            values.fill(buffer.as_mut_slice());
            buffer
        };
        let tensors: Vec<Buffer> = pack.tensors().iter().map(own).collect();
        let gathered = if tensors.len() > 1 { pack.spec().elements() as usize } else { 0 };
        OwnTable { table, tensors, gathered: Buffer::zeroed(gathered) }
    }

    /// Sends the table's gradient, and asks for the parameters that follow it.
    fn push_pull(&mut self) -> Result<Handle, ClientError> {
        if let [tensor] = &self.tensors[..] {
            return self.table.push_pull(tensor.as_slice());
        }
        let mut rest = self.gathered.as_mut_slice();
        for tensor in &self.tensors {
            let place =
                rest.split_off_mut(..tensor.len()).expect("the pack's size is the sum of its tensors'");
            place.copy_from_slice(tensor.as_slice());
        }
        self.table.push_pull(self.gathered.as_slice())
    }
}

/// Waits until every shard has its copies.
fn await_copies(job: &Job, exchange: &Exchange) -> Result<()> {
    let began = Instant::now();
    while exchange.replicas > 0 && job.status()?.served.iter().any(|served| served.copy.is_none()) {
        ensure!(
            began.elapsed() < exchange.timeout,
            "not every shard has a copy after {:?}",
            exchange.timeout
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Parameters on each server.
fn held(status: &Status, exchange: &Exchange) -> Result<Vec<u64>> {
    let mut held = vec![0; exchange.servers as usize];
    for shard in &status.shards {
        if let Some(server) = held.get_mut(shard.shard.server.0 as usize) {
            *server += shard.tables.iter().map(|table| table.elements).sum::<u64>();
        }
    }
    let (sum, elements) = (held.iter().sum::<u64>(), exchange.elements());
    ensure!(sum == elements, "the servers hold {sum} parameters instead of {elements}");
    Ok(held)
}

/// A number that depends on every parameter. A parameter that has not moved since the start is an error: an exchange
/// that exchanges nothing is fast.
fn checksum(job: &Job, tables: &[(Table, Pack)], model: Held, values: &Values) -> Result<u64> {
    // Slabs go back first: while they are lent, their tables cannot be read.
    match model {
        Held::Layers(layers) => drop(layers.into_slabs()?),
        model => drop(model),
    }
    let (mut sum, mut still) = (0u64, 0u64);
    for (table, _) in tables {
        table.read(|parameters| {
            for value in parameters {
                sum = sum.rotate_left(5) ^ u64::from(value.to_bits());
                still += u64::from(!values.has_moved(*value));
            }
        })?;
    }
    ensure!(
        still == 0 || job.iteration() == 0,
        "{still} parameters did not move in {} iterations, or went out of bounds; give another --optimizer",
        job.iteration()
    );
    Ok(sum)
}

fn since_1970(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64)
}

fn microseconds(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}
