//! One file per command.

mod aggregate;
mod bench;
mod chaos;
mod checkpoint;
mod components;
mod config;
mod coordinate;
mod doctor;
mod drain;
mod launch;
mod rebalance;
mod reproduce;
mod serve;
mod set;
mod sim;
mod status;
mod subscribe;
mod train;

pub(crate) use chaos::Kind as ChaosKind;

use crate::args::Command;
use crate::failure::Failure;
use crate::output::Output;
use crate::supervisor::keeper;
use paramill_core::registry::Registry;
use std::sync::Arc;

/// Does what was typed.
pub(crate) fn run(command: Command, output: &Output) -> Result<(), Failure> {
    let registry = Arc::new(Registry::builtin());
    match command {
        Command::Train(args) => train::run(&args, &registry, output),
        Command::WorkerProcess => train::run_worker(&registry, output),
        Command::KeeperProcess => keeper::run(),
        Command::Bench(args) => bench::run(&args, &registry, output),
        Command::BenchProcess => bench::run_process(&registry),
        Command::Chaos(mut args) => chaos::run(&mut args, &registry, output),
        Command::ChaosProcess(args) => chaos::run_process(&args),
        Command::Components(args) => components::run(&args, &registry, output),
        Command::Config(args) => config::run(&args, &registry, output),
        Command::Reproduce(args) => reproduce::run(&args, output),
        Command::Serve(args) => serve::run(&args, &registry, output),
        Command::Coordinate(args) => coordinate::run(&args, &registry, output),
        Command::Aggregate(args) => aggregate::run(&args, &registry, output),
        Command::Launch(args) => launch::run(&args, &registry, output),
        Command::Status(args) => status::run(&args, output),
        Command::Subscribe(args) => subscribe::run(&args, output),
        Command::Save(args) => checkpoint::run(&args, output),
        Command::Set(args) => set::run(&args, &registry, output),
        Command::Drain(args) => drain::run(&args, output),
        Command::Rebalance(args) => rebalance::run(&args, output),
        Command::Doctor(args) => doctor::run(&args, output),
        Command::Sim(args) => sim::run(&args.command, output),
    }
}
