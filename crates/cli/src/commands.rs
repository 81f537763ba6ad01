//! One file per command.

mod components;
mod config;
mod doctor;

use crate::args::Command;
use crate::failure::Failure;
use crate::output::Output;
use paramill_core::registry::Registry;

/// Does what was typed.
pub(crate) fn run(command: Command, output: &Output) -> Result<(), Failure> {
    let registry = Registry::builtin();
    match command {
        Command::Components(args) => components::run(&args, &registry, output),
        Command::Config(args) => config::run(&args, &registry, output),
        Command::Doctor(args) => doctor::run(&args, output),
        _ => Err(Failure::Run(anyhow::anyhow!("this command is not part of this build yet"))),
    }
}
