//! Development commands, run as `cargo xtask NAME`. They need nothing but cargo; those about the Python package need Python.

mod mutants;
mod python;
mod stages;
mod tidy;

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
Development commands of Paramill.

Usage: cargo xtask COMMAND

Commands:
  test          Everything that must pass before a change is merged, stage by stage:
                format, tidy, dependencies, lint, tests, documentation, python.
                With --skip-python without the last, which installs torch (about 5 GB) once.
                With --services only the tests against a real etcd and a store that speaks S3, which are installed if missing
  python        Only the Python package: builds its wheel into a virtual environment and tests it there
  wheel         The wheel to give to others
  tidy          Only the rules of the house: file sizes, names, purity of core, links, dependencies
  lint          Only clippy, with warnings as errors
  fmt           Format all code; with --check only say what would change
  mutants       Whether tests notice changes of core: makes --sample N of them (100), each by itself, and runs core's and
                the simulator's tests. With --shard I/N a part of the sample, with --json a report as JSON. Takes hours;
                installs cargo-mutants
  help          This text
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let root = match workspace_root() {
        Ok(root) => root,
        Err(error) => return failure(&error),
    };
    let outcome = match arguments.as_slice() {
        ["test"] => stages::run(&root, stages::ALL),
        ["test", "--skip-python"] => stages::without_python().and_then(|stages| stages::run(&root, stages)),
        ["test", "--services"] => stages::run(&root, &[stages::SERVICES]),
        ["python"] => stages::run(&root, &[stages::PYTHON]),
        ["wheel"] => stages::run(&root, &[stages::WHEEL]),
        ["tidy"] => stages::run(&root, &[stages::TIDY]),
        ["lint"] => stages::run(&root, &[stages::SETUP, stages::LINT]),
        ["fmt"] => stages::run(&root, &[stages::SETUP, stages::FORMAT]),
        ["fmt", "--check"] => stages::run(&root, &[stages::SETUP, stages::FORMAT_CHECK]),
        ["mutants", rest @ ..] => {
            mutants::Options::parse(rest).and_then(|options| mutants::run(&root, &options))
        }
        ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        unknown => {
            eprintln!("error: no command `{}`\n\n{HELP}", unknown.join(" "));
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure(&error),
    }
}

fn failure(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    ExitCode::FAILURE
}

fn workspace_root() -> Result<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().map(Path::to_owned).context("xtask lies directly below the root of the workspace")
}
