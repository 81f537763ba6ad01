//! `cargo xtask mutants`: how much of what core does is held by a test. Takes a sample of the changes that cargo-mutants can make
//! to core, makes one at a time, and sees whether a test of core or of the simulator fails.
//!
//! Most changes are noticed by core's unit tests, which are built from one crate. The other tests are run only against what is
//! left, the slow ones last.

use crate::stages::{answers, cargo_program};
use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// The part of the sample that has to be noticed.
const ENOUGH: f64 = 0.9;
const PACKAGE: &str = "paramill-core";
const SIMULATOR: &str = "paramill-sim";
/// The copy of the tree that changes are made in, with its own target folder.
const COPY: &str = "target/mutants/tree";
/// Seconds after which a test hangs, if its tests are over sooner without a change.
const MINIMUM_TIMEOUT: &str = "20";

/// Some tests that are run against each change.
struct Trial {
    name: &'static str,
    /// Of these packages.
    packages: &'static str,
    /// What `cargo test` builds of them.
    target: &'static str,
    /// Leaves out tests whose names have one of these in them.
    skipped: &'static [&'static str],
}

const TRIALS: [Trial; 4] = [
    Trial { name: "core's unit tests", packages: PACKAGE, target: "--lib", skipped: &[] },
    Trial {
        name: "tests of whole roles",
        packages: "paramill-core,paramill-sim",
        target: "--test=*",
        skipped: &[],
    },
    // Published experiments and jobs that cannot go on take ten times as long as all other simulations together.
    Trial {
        name: "quick simulations",
        packages: SIMULATOR,
        target: "--lib",
        skipped: &["reproduce::", "stall::"],
    },
    Trial { name: "all simulations", packages: SIMULATOR, target: "--lib", skipped: &[] },
];

/// How the changed code is built, thousands of times: what a change costs is building core again.
const BUILD: [(&str, &str); 3] = [
    ("CARGO_INCREMENTAL", "1"),
    // Inlining across the units of core would build most of them again for any change.
    ("CARGO_PROFILE_DEV_LTO", "off"),
    // Nobody debugs these; without it they are built and linked faster.
    ("CARGO_PROFILE_DEV_DEBUG", "0"),
];

/// What was asked for.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    /// How many changes are tried.
    sample: usize,
    /// How far down the list of changes the sample is moved: another offset is another sample.
    offset: usize,
    /// Only the part of the sample with this number, of so many parts: for several machines.
    shard: (usize, usize),
    json: bool,
}

impl Options {
    /// Reads the words after `mutants`.
    pub(crate) fn parse(words: &[&str]) -> Result<Options> {
        let mut options = Options { sample: 100, offset: 0, shard: (0, 1), json: false };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().copied().with_context(|| format!("{word} needs a value"));
            match *word {
                "--json" => options.json = true,
                "--sample" => options.sample = value()?.parse().context("--sample takes a number")?,
                "--offset" => options.offset = value()?.parse().context("--offset takes a number")?,
                "--shard" => options.shard = shard(value()?)?,
                unknown => bail!("`{unknown}`: expected --sample N, --offset N, --shard I/N or --json"),
            }
        }
        ensure!(options.sample > 0, "--sample 0: expected at least 1");
        Ok(options)
    }
}

fn shard(text: &str) -> Result<(usize, usize)> {
    let (number, count) = text.split_once('/').context("--shard takes I/N, from 0/N on")?;
    let (number, count): (usize, usize) = (number.parse()?, count.parse()?);
    ensure!(number < count, "--shard {text}: expected 0/{count} to {}/{count}", count.saturating_sub(1));
    Ok((number, count))
}

/// What became of the sample.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    caught: Vec<String>,
    /// Survivors.
    missed: Vec<String>,
    /// A test that hangs has noticed too.
    timeout: Vec<String>,
    /// These do not compile, and count for nothing.
    unviable: Vec<String>,
}

impl Outcome {
    /// Adds what became of some more.
    fn add(&mut self, other: Outcome) {
        self.caught.extend(other.caught);
        self.missed.extend(other.missed);
        self.timeout.extend(other.timeout);
        self.unviable.extend(other.unviable);
    }

    fn share(&self) -> f64 {
        let noticed = self.caught.len() + self.timeout.len();
        noticed as f64 / (noticed + self.missed.len()).max(1) as f64
    }
}

/// Runs the sample, says what survived, and fails when too much did.
pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    install()?;
    let copy = root.join(COPY);
    copy_tree(root, &copy)?;
    let listed = cargo_mutants(&copy, &["--list"])?;
    let names: Vec<&str> = listed.lines().filter(|line| !line.trim().is_empty()).collect();
    let sample = every_nth(&names, options);
    ensure!(!sample.is_empty(), "nothing is left of {} changes", names.len());
    eprintln!("{} of {} changes that can be made to {PACKAGE}", sample.len(), names.len());
    let mut outcome =
        Outcome { missed: sample.into_iter().map(str::to_owned).collect(), ..Outcome::default() };
    for trial in TRIALS {
        if !outcome.missed.is_empty() {
            eprintln!("{} changes against {}", outcome.missed.len(), trial.name);
            let left = std::mem::take(&mut outcome.missed);
            outcome.add(try_out(&copy, &trial, &left)?);
        }
    }
    print(&outcome, options.json);
    let share = outcome.share();
    ensure!(share >= ENOUGH, "{:.0}% were noticed, at least {:.0}% should be", share * 100.0, ENOUGH * 100.0);
    Ok(())
}

/// Copies what git knows, or would, so that the tree itself is never changed. What was built in the copy stays.
fn copy_tree(root: &Path, copy: &Path) -> Result<()> {
    fs::create_dir_all(copy)?;
    for entry in fs::read_dir(copy)? {
        let entry = entry?;
        if entry.file_name() == "target" {
            continue;
        }
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())
        } else {
            fs::remove_file(entry.path())
        }?;
    }
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .stderr(Stdio::inherit())
        .output()
        .context("git could not be started")?;
    ensure!(listed.status.success(), "git ls-files ended with {}", listed.status);
    let listed = String::from_utf8(listed.stdout).context("file names are UTF-8")?;
    for name in listed.split_terminator('\0') {
        let (from, to) = (root.join(name), copy.join(name));
        // What was deleted and not committed yet is still listed.
        if from.is_file() {
            fs::create_dir_all(to.parent().unwrap_or(copy))?;
            fs::copy(&from, &to).with_context(|| format!("{name} could not be copied"))?;
        }
    }
    Ok(())
}

/// Asks cargo for cargo-mutants where it is missing.
fn install() -> Result<()> {
    if answers(&cargo_program(), &["mutants", "--version"]) {
        return Ok(());
    }
    eprintln!("cargo-mutants is missing; cargo installs it");
    let installed = Command::new(cargo_program()).args(["install", "--locked", "cargo-mutants"]).status()?;
    ensure!(
        installed.success(),
        "cargo-mutants could not be installed: cargo install --locked cargo-mutants"
    );
    Ok(())
}

fn cargo_mutants(root: &Path, arguments: &[&str]) -> Result<String> {
    let run = Command::new(cargo_program())
        .args(["mutants", "--package", PACKAGE])
        .args(arguments)
        .current_dir(root)
        .stderr(Stdio::inherit())
        .output()
        .context("cargo mutants could not be started")?;
    ensure!(run.status.success(), "cargo mutants ended with {}", run.status);
    String::from_utf8(run.stdout).context("cargo mutants answers in UTF-8")
}

/// Evenly from the whole list, so that every part of core has its share, and the same ones every time.
fn every_nth<'a>(names: &[&'a str], options: &Options) -> Vec<&'a str> {
    let sample = options.sample.min(names.len());
    let (number, count) = options.shard;
    (0..sample)
        .filter(|index| index % count == number)
        .map(|index| names[(index * names.len() / sample + options.offset) % names.len()])
        .collect()
}

/// Has cargo-mutants make each change, and run the tests of a trial. It runs them without a change first: what fails then says
/// nothing.
fn try_out(copy: &Path, trial: &Trial, sample: &[String]) -> Result<Outcome> {
    let mut command = Command::new(cargo_program());
    command.args(["mutants", "--package", PACKAGE, "--test-package", trial.packages]);
    command.args(["--in-place", "--minimum-test-timeout", MINIMUM_TIMEOUT, "--no-shuffle"]);
    for name in sample {
        command.arg("--re").arg(format!("^{}$", escaped(name)));
    }
    // Some kinds of changes are made whatever the patterns say: hardly any, if only these lines are looked at.
    let lines = copy.with_file_name("sample.diff");
    fs::write(&lines, diff(sample, |file| Ok(fs::read_to_string(copy.join(file))?))?)?;
    command.arg("--in-diff").arg(&lines);
    // What follows `--` would be for running only, and everything would be built.
    command.arg(format!("--cargo-arg={}", trial.target));
    command.envs(BUILD);
    if !trial.skipped.is_empty() {
        command.args(["--", "--"]).args(trial.skipped.iter().flat_map(|name| ["--skip", name]));
    }
    // Its report is on stderr; stdout is for ours.
    let status = command.current_dir(copy).stdout(Stdio::null()).status()?;
    let reports = copy.join("mutants.out");
    let lines = |file: &str| -> Result<Vec<String>> {
        let text =
            fs::read_to_string(reports.join(file)).with_context(|| format!("{file} of cargo-mutants"))?;
        Ok(text.lines().filter(|line| sample.iter().any(|name| name == line)).map(str::to_owned).collect())
    };
    let outcome = Outcome {
        caught: lines("caught.txt")?,
        missed: lines("missed.txt")?,
        timeout: lines("timeout.txt")?,
        unviable: lines("unviable.txt")?,
    };
    let seen = outcome.caught.len() + outcome.missed.len() + outcome.timeout.len() + outcome.unviable.len();
    // Survivors and time-outs have exit codes of their own; without any outcome the tests fail as they are.
    ensure!(
        seen == sample.len(),
        "cargo mutants ended with {status} after {seen} of {} changes",
        sample.len()
    );
    Ok(outcome)
}

/// A diff in which the lines of these changes are new.
fn diff(sample: &[String], read: impl Fn(&str) -> Result<String>) -> Result<String> {
    let mut lines: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for name in sample {
        let mut parts = name.split(':');
        let (file, line) = (parts.next(), parts.next().and_then(|line| line.parse().ok()));
        let (Some(file), Some(line)) = (file, line) else { bail!("`{name}`: expected FILE:LINE:COLUMN") };
        lines.entry(file).or_default().insert(line);
    }
    let mut diff = String::new();
    for (file, lines) in lines {
        diff += &format!("--- a/{file}\n+++ b/{file}\n");
        let text = read(file)?;
        for line in lines {
            let content = text.lines().nth(line - 1).with_context(|| format!("{file} has no line {line}"))?;
            diff += &format!("@@ -0,0 +{line},1 @@\n+{content}\n");
        }
    }
    Ok(diff)
}

/// A regular expression that matches this text only.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        if r"\.+*?()|[]{}^$#&-~".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

fn print(outcome: &Outcome, as_json: bool) {
    let Outcome { caught, missed, timeout, unviable } = outcome;
    if as_json {
        let report = json!({
            "caught": caught.len(),
            "missed": missed.len(),
            "timeout": timeout.len(),
            "unviable": unviable.len(),
            "share": outcome.share(),
            "survivors": missed,
        });
        println!("{report}");
        return;
    }
    let (noticed, hung) = (caught.len(), timeout.len());
    println!(
        "{noticed} caught, {} missed, {hung} timed out, {} do not compile",
        missed.len(),
        unviable.len()
    );
    for name in missed {
        println!("survived: {name}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_or_refused() {
        let read = |words: &[&str]| Options::parse(words);
        assert_eq!(read(&[]).unwrap(), Options { sample: 100, offset: 0, shard: (0, 1), json: false });
        let all = read(&["--json", "--sample", "3", "--offset", "4", "--shard", "1/2"]).unwrap();
        assert_eq!(all, Options { sample: 3, offset: 4, shard: (1, 2), json: true });
        let wrong = [
            &["--sample"][..],
            &["--sample", "0"],
            &["--offset", "-1"],
            &["--shard", "2/2"],
            &["--shard", "1"],
            &["3"],
        ];
        for wrong in wrong {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_sample_is_spread_over_the_list_and_shards_divide_it() {
        let names: Vec<String> = (0..10).map(|number| number.to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let moved =
            |sample, offset, shard| every_nth(&names, &Options { sample, offset, shard, json: false });
        let of = |sample, shard| moved(sample, 0, shard);
        assert_eq!(of(3, (0, 1)), ["0", "3", "6"]);
        assert_eq!((of(3, (0, 2)), of(3, (1, 2))), (vec!["0", "6"], vec!["3"]));
        assert_eq!(of(100, (0, 1)), names);
        assert_eq!(moved(3, 1, (0, 1)), ["1", "4", "7"]);
        assert_eq!(moved(3, 4, (0, 1)), ["4", "7", "0"]);
    }

    #[test]
    fn what_hangs_is_noticed_and_what_does_not_compile_does_not_count() {
        let names = |count: usize| vec!["a change".to_owned(); count];
        let outcome = Outcome { caught: names(7), missed: names(1), timeout: names(2), unviable: names(5) };
        assert_eq!(outcome.share(), 0.9);
        assert_eq!(Outcome::default().share(), 0.0);
    }

    #[test]
    fn what_one_trial_leaves_is_counted_by_the_next() {
        let names = |count: usize| vec!["a change".to_owned(); count];
        let mut outcome = Outcome { caught: names(3), unviable: names(1), ..Outcome::default() };
        outcome.add(Outcome { caught: names(1), missed: names(2), timeout: names(1), ..Outcome::default() });
        let counted =
            [&outcome.caught, &outcome.missed, &outcome.timeout, &outcome.unviable].map(|names| names.len());
        assert_eq!(counted, [4, 2, 1, 1]);
    }

    #[test]
    fn only_lines_of_the_sample_are_looked_at() {
        let sample =
            ["b.rs:2:1: delete !", "a.rs:1:5: replace + with -", "b.rs:2:9: delete -"].map(str::to_owned);
        let read = |file: &str| Ok(format!("first of {file}\nsecond of {file}\n"));
        let expected = "--- a/a.rs\n+++ b/a.rs\n@@ -0,0 +1,1 @@\n+first of a.rs\n\
                        --- a/b.rs\n+++ b/b.rs\n@@ -0,0 +2,1 @@\n+second of b.rs\n";
        assert_eq!(diff(&sample, read).unwrap(), expected);
        assert!(diff(&["b.rs:3:1: delete !".to_owned()], read).is_err());
    }

    #[test]
    fn a_name_matches_nothing_but_itself() {
        assert_eq!(
            escaped("a.rs:1:2: replace x -> Vec<u8> with vec![]"),
            r"a\.rs:1:2: replace x \-> Vec<u8> with vec!\[\]"
        );
    }
}
