//! The stages of `cargo xtask test`: each a name, a command that runs it alone, and a function.

use crate::{python, tidy};
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// One thing that must pass.
#[derive(Clone, Copy)]
pub(crate) struct Stage {
    name: &'static str,
    /// What to type to run only this.
    alone: &'static str,
    run: fn(&Path) -> Result<()>,
}

/// Tools that a bare toolchain may lack.
pub(crate) const SETUP: Stage =
    Stage { name: "setup", alone: "rustup component add rustfmt clippy", run: set_up };
/// Formats.
pub(crate) const FORMAT: Stage =
    Stage { name: "format", alone: "cargo xtask fmt", run: |root| cargo(root, &["fmt", "--all"], &[]) };
/// Says what would be formatted.
pub(crate) const FORMAT_CHECK: Stage = Stage {
    name: "format",
    alone: "cargo xtask fmt",
    run: |root| cargo(root, &["fmt", "--all", "--check"], &[]),
};
/// The rules of the house.
pub(crate) const TIDY: Stage = Stage { name: "tidy", alone: "cargo xtask tidy", run: tidy::run };
/// Clippy.
pub(crate) const LINT: Stage = Stage {
    name: "lint",
    alone: "cargo xtask lint",
    run: |root| cargo(root, &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"], &[]),
};
const DENY: Stage =
    Stage { name: "dependencies", alone: "cargo deny check bans licenses sources", run: check_dependencies };
const TEST: Stage = Stage {
    name: "tests",
    alone: "cargo test --workspace",
    run: |root| cargo(root, &["test", "--workspace"], &[]),
};
const DOC: Stage = Stage {
    name: "documentation",
    alone: "RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps",
    run: |root| cargo(root, &["doc", "--workspace", "--no-deps"], &[("RUSTDOCFLAGS", "-D warnings")]),
};
/// The Python package.
pub(crate) const PYTHON: Stage = Stage { name: "python", alone: "cargo xtask python", run: python::test };
/// Its wheel.
pub(crate) const WHEEL: Stage = Stage { name: "wheel", alone: "cargo xtask wheel", run: python::wheel };

/// The package from PyPI with a store that speaks S3.
const STORE: &str = "moto[server]==5.2.5";
/// Tests against programs of others, which are installed if they are missing.
pub(crate) const SERVICES: Stage =
    Stage { name: "services", alone: "cargo xtask test --services", run: test_services };

/// Quick stages first, so that a slip is known in seconds.
pub(crate) const ALL: &[Stage] = &[SETUP, FORMAT_CHECK, TIDY, DENY, LINT, TEST, DOC, PYTHON];

/// All but the tests of the Python package, for machines without Python or without room for torch. CI has both.
pub(crate) fn without_python() -> Result<&'static [Stage]> {
    if std::env::var_os("CI").is_some() {
        bail!("CI runs the tests of the Python package too; leave --skip-python out");
    }
    eprintln!("the tests of the Python package are left out; `cargo xtask python` runs them");
    Ok(&ALL[..ALL.len() - 1])
}

/// Runs stages in order, stops at the first that fails, and says how long each took.
pub(crate) fn run(root: &Path, stages: &[Stage]) -> Result<()> {
    let mut done: Vec<(&str, Duration)> = Vec::new();
    for stage in stages {
        eprintln!("==> {}", stage.name);
        let start = Instant::now();
        let outcome = (stage.run)(root);
        done.push((stage.name, start.elapsed()));
        if let Err(error) = outcome {
            print_times(&done, Some(stage.name));
            bail!("stage `{}` failed: {error:#}\nTo run it alone: {}", stage.name, stage.alone);
        }
    }
    if stages.len() > 1 {
        print_times(&done, None);
    }
    Ok(())
}

fn print_times(done: &[(&str, Duration)], failed: Option<&str>) {
    eprintln!();
    for (name, time) in done {
        let verdict = if failed == Some(name) { "FAILED" } else { "ok" };
        eprintln!("{name:<15}{verdict:<8}{:>8.1} s", time.as_secs_f64());
    }
    let total: Duration = done.iter().map(|(_, time)| *time).sum();
    eprintln!("{:<23}{:>8.1} s", "total", total.as_secs_f64());
}

/// rustfmt and clippy are optional parts of a toolchain.
fn set_up(_root: &Path) -> Result<()> {
    for (subcommand, component) in [("fmt", "rustfmt"), ("clippy", "clippy")] {
        if answers(&cargo_program(), &[subcommand, "--version"]) {
            continue;
        }
        eprintln!("{component} is missing; asking rustup for it");
        let added = Command::new("rustup").args(["component", "add", component]).status();
        if !added.is_ok_and(|status| status.success()) {
            bail!("{component} is missing and rustup could not add it; install it with your toolchain");
        }
    }
    Ok(())
}

/// cargo-deny where it is installed; tidy has already checked the same rules in its own way where it is not.
fn check_dependencies(root: &Path) -> Result<()> {
    if answers(&cargo_program(), &["deny", "--version"]) {
        return cargo(root, &["deny", "check", "bans", "licenses", "sources"], &[]);
    }
    eprintln!(
        "cargo-deny is not installed; tidy's own check of dependencies, licences and sources stands alone"
    );
    Ok(())
}

/// Jobs whose coordinators keep their state in a real etcd, and checkpoints in a store that speaks S3.
fn test_services(root: &Path) -> Result<()> {
    if !answers("etcd", &["--version"]) {
        eprintln!("etcd is missing; asking apt for it");
        let install = "apt-get update && apt-get install -y etcd-server";
        let installed = Command::new("sh").args(["-c", install]).status();
        if !installed.is_ok_and(|status| status.success()) {
            bail!("etcd is missing and apt could not install it; install Debian's etcd-server");
        }
    }
    cargo(root, &["test", "-p", "paramill", "--test", "etcd"], &[("PARAMILL_TEST_ETCD", "etcd")])?;
    let store = python::program_of(root, STORE, "moto_server")?;
    // Both packages at once: by itself the node would have all crates below it built with other features, anew.
    let both = ["test", "-p", "paramill-node", "-p", "paramill", "--lib", "checkpoint", "--features"];
    cargo(root, &[&both[..], &["paramill-node/object-store,paramill/object-store"]].concat(), &[])?;
    let test = ["test", "-p", "paramill", "--features", "object-store", "--test", "buckets"];
    cargo(root, &test, &[("PARAMILL_TEST_S3", &store.to_string_lossy())])
}

fn cargo(root: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Result<()> {
    let status = Command::new(cargo_program())
        .args(arguments)
        .envs(variables.iter().copied())
        .current_dir(root)
        .status()
        .context("cargo could not be started")?;
    if !status.success() {
        bail!("cargo {} ended with {status}", arguments.join(" "));
    }
    Ok(())
}

/// The cargo that runs us, so that a toolchain chosen with `+NAME` stays chosen.
pub(crate) fn cargo_program() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}

/// Whether a program is there, and takes these arguments.
pub(crate) fn answers(program: &str, arguments: &[&str]) -> bool {
    let status = Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}
