//! The `paramill` command: what was typed ([`args`]), what it means ([`plan`]), what is done ([`commands`]).

mod args;
mod commands;
mod duration;
mod failure;
mod group;
mod input;
mod interrupt;
mod listening;
mod output;
mod plan;
mod plot;
mod state_place;
mod supervisor;
mod training;

use output::Output;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = args::Args::read();
    let output = Output::new(args.json, args.quiet);
    let outcome = interrupt::install().and_then(|()| commands::run(args.command, &output));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            interrupt::yield_to_interrupt();
            failure.report()
        }
    }
}
