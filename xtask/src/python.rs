//! The Python package: a wheel, and its tests in a virtual environment below the target directory.

use crate::stages::cargo_program;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Interpreters, the usual one first. Any from 3.10 on will do.
const INTERPRETERS: [&str; 5] = ["python3", "python3.13", "python3.12", "python3.11", "python3.10"];
const IS_NEW_ENOUGH: &str = "import sys; sys.exit(sys.version_info < (3, 10))";

/// Builds the wheel as developers build everything, installs it, and runs its tests with real servers.
pub(crate) fn test(root: &Path) -> Result<()> {
    let target = target_directory(root)?;
    let venv = Venv::of_package(root, &target)?;
    let wheel = build(root, &target, &venv, "dev")?;
    venv.run(root, "pip", &["install", "--quiet", "--force-reinstall", "--no-deps", &text(&wheel)])?;
    let package = root.join("python");
    // Run from elsewhere, so that what is tested is what was installed.
    let tests = text(&package.join("tests"));
    let settings = text(&package.join("pyproject.toml"));
    venv.run(
        &target,
        "pytest",
        &["--quiet", "--config-file", &settings, "--rootdir", &text(&package), &tests],
    )?;
    venv.run(
        &target,
        "pytest",
        &["--quiet", "--config-file", &settings, "--pyargs", "--doctest-modules", "paramill"],
    )?;
    venv.run(&target, "mypy", &["--config-file", &settings, "-p", "paramill"])?;
    venv.run(&target, "stubtest", &["--concise", "paramill._native"])
}

/// Builds the wheel that is given to others; says where it is.
pub(crate) fn wheel(root: &Path) -> Result<()> {
    let target = target_directory(root)?;
    let venv = Venv::of_package(root, &target)?;
    let wheel = build(root, &target, &venv, "release")?;
    let megabytes = fs::metadata(&wheel)?.len() as f64 / 1e6;
    println!("{} ({megabytes:.1} MB)", wheel.display());
    Ok(())
}

/// A wheel with the native module and the command `paramill`.
fn build(root: &Path, target: &Path, venv: &Venv, profile: &str) -> Result<PathBuf> {
    let built = if profile == "dev" { "debug" } else { profile };
    let status = Command::new(cargo_program())
        .args(["build", "--package", "paramill", "--profile", profile])
        .current_dir(root)
        .status()
        .context("cargo could not be started")?;
    ensure!(status.success(), "the command `paramill` could not be built");
    let scripts = root.join("python/paramill.data/scripts");
    fs::create_dir_all(&scripts)?;
    fs::copy(target.join(built).join("paramill"), scripts.join("paramill"))?;
    let wheels = target.join("wheels").join(profile);
    if wheels.exists() {
        fs::remove_dir_all(&wheels)?;
    }
    let mut arguments: Vec<String> =
        ["build", "--profile", profile, "--interpreter"].map(str::to_owned).into();
    arguments.extend([text(&venv.program("python")), "--out".to_owned(), text(&wheels)]);
    // Only what is given away has to be small; stripping would build everything once more.
    arguments.extend((profile != "dev").then(|| "--strip".to_owned()));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    venv.run(&root.join("python"), "maturin", &arguments)?;
    let built = fs::read_dir(&wheels)?.filter_map(Result::ok).map(|entry| entry.path());
    built
        .into_iter()
        .find(|path| path.extension().is_some_and(|ending| ending == "whl"))
        .context("maturin left no wheel")
}

/// Where a program is that comes with a package of others. The package is installed if it is missing.
pub(crate) fn program_of(root: &Path, package: &str, program: &str) -> Result<PathBuf> {
    let venv = Venv::ready(target_directory(root)?.join("services"), package, &[package])?;
    Ok(venv.program(program))
}

/// A virtual environment.
struct Venv(PathBuf);

impl Venv {
    /// The one with what the package's tests need.
    fn of_package(root: &Path, target: &Path) -> Result<Venv> {
        let list = root.join("python/requirements-dev.txt");
        Venv::ready(target.join("python"), &fs::read_to_string(&list)?, &["-r", &text(&list)])
    }

    /// Makes it, or uses the one that is there if nothing else is asked for since.
    fn ready(folder: PathBuf, wanted: &str, packages: &[&str]) -> Result<Venv> {
        let venv = Venv(folder);
        let stamp = venv.0.join("requirements.txt");
        if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
            return Ok(venv);
        }
        eprintln!("installing {} (some minutes, and 5 GB where torch is asked for)", packages.join(" "));
        let status = Command::new(interpreter()?).args(["-m", "venv", "--clear"]).arg(&venv.0).status()?;
        ensure!(status.success(), "a virtual environment could not be made; is Python's `venv` installed?");
        let install = [&["install", "--quiet", "--disable-pip-version-check"], packages].concat();
        venv.run(Path::new("."), "pip", &install)?;
        fs::write(stamp, wanted)?;
        Ok(venv)
    }

    fn program(&self, name: &str) -> PathBuf {
        self.0.join("bin").join(name)
    }

    fn run(&self, folder: &Path, program: &str, arguments: &[&str]) -> Result<()> {
        let status = Command::new(self.program(program))
            .args(arguments)
            .env("VIRTUAL_ENV", &self.0)
            .current_dir(folder)
            .status()
            .with_context(|| format!("{program} could not be started"))?;
        ensure!(status.success(), "{program} {} ended with {status}", arguments.join(" "));
        Ok(())
    }
}

fn interpreter() -> Result<&'static str> {
    for name in INTERPRETERS {
        let status = Command::new(name).args(["-c", IS_NEW_ENOUGH]).status();
        if status.is_ok_and(|status| status.success()) {
            return Ok(name);
        }
    }
    bail!(
        "no Python from 3.10 on was found; install one, or leave these tests out with `cargo xtask test --skip-python`"
    )
}

fn target_directory(root: &Path) -> Result<PathBuf> {
    let output = Command::new(cargo_program())
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .current_dir(root)
        .output()
        .context("cargo could not be started")?;
    let metadata: Value =
        serde_json::from_slice(&output.stdout).context("cargo metadata did not answer in JSON")?;
    let directory =
        metadata["target_directory"].as_str().context("cargo metadata names no target directory")?;
    Ok(PathBuf::from(directory))
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
