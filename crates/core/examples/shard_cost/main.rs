//! What a shard's own work costs per push frame, over tables and workers; no sockets. Run it in release mode:
//!
//! `cargo run --release -p paramill-core --example shard_cost [WORKERS TABLES ELEMENTS [OPTIMIZER [CODEC]]]`

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    clippy::disallowed_macros,
    reason = "it measures, takes arguments and prints"
)]

mod load;

use load::{Load, Work};
use paramill_core::policy::{Axis, Policy};
use std::time::Instant;

/// Nanoseconds per push frame with its share of acknowledgements, steps and answers; the best of some tries.
fn cost(work: Work) -> (f64, f64) {
    let mut load = Load::new(work);
    let frames = load.frames_per_round();
    // About a tenth of a second.
    let rounds = (100_000 / frames).min(2_000_000_000 / (load.elements_per_round() * 10)).clamp(2, 20_000);
    (0..rounds / 4 + 2).for_each(|_| _ = load.round());
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        (0..rounds).for_each(|_| _ = load.round());
        best = best.min(start.elapsed().as_nanos() as f64 / (rounds * frames) as f64);
    }
    (best, load.memory_bytes() as f64 / 1e6)
}

fn main() {
    let policy = |optimizer: &str| Policy::default().with(Axis::Optimizer, optimizer);
    let sgd = policy("sgd:lr=0.1");
    println!(
        "{:>8} {:>9} {:>8} {:>12} {:>10} {:>8}",
        "workers", "tables", "elements", "ns/frame", "ns/element", "MB"
    );
    let show = |work: Work| {
        let (workers, tables, elements) = (work.workers, work.tables, work.elements);
        let (optimizer, codec) =
            (work.policy.get(Axis::Optimizer).to_owned(), work.policy.get(Axis::Codec).to_owned());
        let (ns, megabytes) = cost(work);
        let per_frame = elements.min(8192);
        println!(
            "{workers:>8} {tables:>9} {elements:>8} {ns:>12.0} {:>10.3} {megabytes:>8.1}  {optimizer} {codec}",
            ns / per_frame as f64
        );
    };
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [workers, tables, elements, rest @ ..] = &args[..] {
        let number = |text: &String| text.parse::<usize>().unwrap_or_else(|_| panic!("`{text}`: a number"));
        let mut policy = rest.first().map_or(sgd, |optimizer| policy(optimizer));
        if let Some(codec) = rest.get(1) {
            policy = policy.with(Axis::Codec, codec);
        }
        return show(Work {
            workers: number(workers) as u32,
            tables: number(tables) as u32,
            elements: number(elements),
            policy,
        });
    }
    for tables in [1, 10, 100, 1000, 10_000] {
        for workers in [1, 2, 8, 64] {
            show(Work { workers, tables, elements: 100, policy: sgd.clone() });
        }
    }
    for (tables, elements) in [(1, 100_000), (161, 159_000), (1, 25_600_000)] {
        for workers in [1, 2, 8] {
            show(Work { workers, tables, elements, policy: sgd.clone() });
        }
    }
    for codec in ["f16", "bf16"] {
        let policy = sgd.clone().with(Axis::Codec, codec);
        show(Work { workers: 2, tables: 161, elements: 159_000, policy });
    }
    for optimizer in ["momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw"] {
        show(Work { workers: 2, tables: 161, elements: 159_000, policy: policy(optimizer) });
    }
}
