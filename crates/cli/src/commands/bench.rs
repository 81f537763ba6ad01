//! `paramill bench`: the data path against this machine's own limits, and against others that do the same work.

mod broadcast;
mod cluster;
mod codec;
mod congestion;
mod endpoint;
mod exchange;
mod fleet;
mod kernels;
mod layers;
mod limits;
mod peers;
mod plan;
mod report;
mod simulated;
mod statistics;
mod task;
mod usage;
mod values;
mod worker;

use crate::args::{BenchArgs, BenchCommand};
use crate::failure::Failure;
use crate::output::Output;
use paramill_core::registry::Registry;
use std::sync::Arc;

/// Measures what was asked for.
pub(crate) fn run(args: &BenchArgs, registry: &Arc<Registry>, output: &Output) -> Result<(), Failure> {
    match &args.command {
        BenchCommand::Exchange(args) => exchange::run(args, registry, output),
        BenchCommand::Broadcast(args) => broadcast::run(args, registry, output),
        BenchCommand::Codec(args) => codec::run(args, registry, output),
        BenchCommand::Kernels(args) => kernels::run(args, registry, output),
    }
}

/// A process of a measurement.
pub(crate) fn run_process(registry: &Arc<Registry>) -> Result<(), Failure> {
    Ok(task::run(registry)?)
}
