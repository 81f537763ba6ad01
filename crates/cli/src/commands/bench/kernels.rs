//! `paramill bench kernels`: bytes per second through the loops that touch every element.

mod cases;

use super::statistics::Spread;
use crate::args::KernelArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::{Align, Output, Table};
use anyhow::{Result, anyhow, ensure};
use cases::{Arrays, Case};
use paramill_core::registry::Registry;
use serde::Serialize;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const GB: f64 = 1e9;
const MAX_ELEMENTS: usize = 1 << 28;

/// Where the arrays lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum From {
    Cache,
    Memory,
}

/// What was measured. A GB is 10^9 bytes.
#[derive(Debug, Serialize)]
struct Report {
    cores: usize,
    seconds: f64,
    rounds: u32,
    /// The most bytes that simple loops read and write per second, from memory.
    limits: Vec<Limit>,
    kernels: Vec<Measured>,
}

#[derive(Debug, Serialize)]
struct Limit {
    threads: usize,
    /// Which loop it is.
    kernel: String,
    traffic_gb_s: f64,
}

#[derive(Debug, Serialize)]
struct Measured {
    kernel: String,
    /// Type of the gradient's elements.
    gradient: &'static str,
    from: From,
    elements: usize,
    threads: usize,
    /// Bytes of gradient.
    gradient_gb_s: f64,
    /// Bytes read and written.
    traffic_gb_s: f64,
    traffic_spread_gb_s: Spread,
    /// Of the limit for as many threads; from memory only.
    fraction_of_limit: Option<f64>,
}

pub(super) fn run(args: &KernelArgs, registry: &Registry, output: &Output) -> Result<(), Failure> {
    check(args).or_usage()?;
    let cases = cases::all(registry, &args.optimizer).or_usage()?;
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let mut report =
        Report { cores, seconds: args.seconds, rounds: args.rounds, limits: Vec::new(), kernels: Vec::new() };
    let (mut settings, mut progress) = (Vec::new(), output.progress(if cores > 1 { 4 } else { 2 }));
    for threads in if cores > 1 { vec![1, cores] } else { vec![1] } {
        settings.push((threads, From::Memory, args.memory_elements));
        settings.push((threads, From::Cache, args.cache_elements));
    }
    for (done, (threads, from, elements)) in settings.into_iter().enumerate() {
        let place = match from {
            From::Cache => "caches",
            From::Memory => "memory",
        };
        progress.set(done as u64, &format!("settings: {threads} threads, from {place}"));
        let rates = measure(&cases, threads, elements, args)?;
        report.add(&cases, &rates, threads, from, elements);
    }
    drop(progress);
    Ok(report.print(output)?)
}

fn check(args: &KernelArgs) -> Result<()> {
    ensure!((0.0..=60.0).contains(&args.seconds), "--seconds {}: expected 0 to 60", args.seconds);
    ensure!((1..=1000).contains(&args.rounds), "--rounds {}: expected 1 to 1000", args.rounds);
    for (name, elements) in
        [("cache-elements", args.cache_elements), ("memory-elements", args.memory_elements)]
    {
        ensure!((1..=MAX_ELEMENTS).contains(&elements), "--{name} {elements}: expected 1 to {MAX_ELEMENTS}");
    }
    Ok(())
}

/// Elements per second of each case, round by round, of all threads together.
fn measure(cases: &[Case], threads: usize, elements: usize, args: &KernelArgs) -> Result<Vec<Vec<f64>>> {
    let time = Duration::from_secs_f64(args.seconds);
    let start = Barrier::new(threads);
    // Arrays are taken once: the first touch of a page costs more than a step.
    let one = || {
        let mut arrays = Arrays::new(elements);
        let mut rates = vec![Vec::new(); cases.len()];
        for _ in 0..args.rounds {
            for (case, rates) in cases.iter().zip(&mut rates) {
                case.run(&mut arrays);
                start.wait();
                rates.push(rate(case, &mut arrays, time));
            }
        }
        rates
    };
    let mut total = vec![vec![0.0; args.rounds as usize]; cases.len()];
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        for thread in running {
            let rates = thread.join().map_err(|_| anyhow!("a thread panicked"))?;
            for (total, rate) in total.iter_mut().flatten().zip(rates.iter().flatten()) {
                *total += rate;
            }
        }
        Ok(total)
    })
}

/// Elements per second.
fn rate(case: &Case, arrays: &mut Arrays, time: Duration) -> f64 {
    let (began, mut passes) = (Instant::now(), 0u64);
    loop {
        // A clock that is read after every pass over a cache would be part of what is measured.
        let batch = (65_536 / arrays.elements()).max(1);
        (0..batch).for_each(|_| case.run(arrays));
        passes += batch as u64;
        let elapsed = began.elapsed();
        if elapsed >= time {
            return passes as f64 * arrays.elements() as f64 / elapsed.as_secs_f64();
        }
    }
}

impl Report {
    fn add(&mut self, cases: &[Case], rates: &[Vec<f64>], threads: usize, from: From, elements: usize) {
        let traffic = |case: &Case, rate: f64| case.bytes_per_element() as f64 * rate / GB;
        let measured = || cases.iter().zip(rates);
        if from == From::Memory {
            let yardsticks = measured().filter(|(case, _)| case.work.is_yardstick());
            let best = yardsticks
                .map(|(case, rates)| (case, traffic(case, Spread::of(rates).median)))
                .max_by(|a, b| a.1.total_cmp(&b.1));
            self.limits.extend(best.map(|(case, traffic_gb_s)| Limit {
                threads,
                kernel: case.work.to_string(),
                traffic_gb_s,
            }));
        }
        let limit = self.limits.iter().find(|limit| limit.threads == threads).map(|limit| limit.traffic_gb_s);
        for (case, rates) in measured() {
            let rates: Vec<f64> = rates.iter().map(|rate| traffic(case, *rate)).collect();
            let spread = Spread::of(&rates);
            self.kernels.push(Measured {
                kernel: case.work.to_string(),
                gradient: case.element.name(),
                from,
                elements,
                threads,
                gradient_gb_s: spread.median * case.element.bytes() as f64 / case.bytes_per_element() as f64,
                traffic_gb_s: spread.median,
                traffic_spread_gb_s: spread,
                fraction_of_limit: limit.filter(|_| from == From::Memory).map(|limit| spread.median / limit),
            });
        }
    }

    fn print(&self, output: &Output) -> Result<()> {
        if output.json() {
            return Ok(output.object(self)?);
        }
        for limit in &self.limits {
            output.text(format!(
                "the most from memory on {} of {} cores: {:.1} GB/s read and written ({})",
                limit.threads, self.cores, limit.traffic_gb_s, limit.kernel
            ))?;
        }
        let mut titles =
            vec![("GB/s of gradient".to_owned(), Align::Left), ("gradient".to_owned(), Align::Left)];
        let mut settings: Vec<(usize, From)> = Vec::new();
        for measured in &self.kernels {
            if !settings.contains(&(measured.threads, measured.from)) {
                settings.push((measured.threads, measured.from));
            }
        }
        for (threads, from) in &settings {
            let place = if *from == From::Cache { "cache" } else { "memory (of limit)" };
            titles.push((format!("{threads} x {place}"), Align::Right));
        }
        let mut table = Table::new(titles);
        let per_setting = self.kernels.len() / settings.len().max(1);
        for row in 0..per_setting {
            let first = &self.kernels[row];
            let mut cells = vec![first.kernel.clone(), first.gradient.to_owned()];
            for measured in self.kernels.iter().skip(row).step_by(per_setting) {
                let fraction = measured.fraction_of_limit.map(|fraction| format!(" ({fraction:.2})"));
                cells.push(format!("{:.1}{}", measured.gradient_gb_s, fraction.unwrap_or_default()));
            }
            table.row(cells);
        }
        Ok(output.table(&table)?)
    }
}
