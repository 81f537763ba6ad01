//! `paramill sim`: jobs in virtual time, from a file or drawn from seeds.

mod sockets;
mod training;

use crate::args::{ScenarioArgs, SimCommand, SwarmArgs};
use crate::failure::{Failure, OrUsage};
use crate::input::read_text;
use crate::output::{self, Align, Output, Table, bytes};
use anyhow::{Context, anyhow};
use paramill_sim::canary::Canary;
use paramill_sim::report::{Report, run_scenario};
use paramill_sim::scenario::Scenario;
use paramill_sim::swarm::{self, Outcome, SeedResult};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;

/// Worlds that a planted bug may hide in before the search is given up.
const CANARY_TRIES: u64 = 1000;
/// Links that are printed; JSON has all.
const BUSIEST: usize = 5;
/// Worlds after which everything that can be drawn must have been.
const FULL_RUN: u64 = 50_000;

pub(crate) fn run(command: &SimCommand, output: &Output) -> Result<(), Failure> {
    match command {
        SimCommand::Swarm(args) if args.canary => hunt(args, output),
        SimCommand::Swarm(args) => swarm(args, output),
        SimCommand::Run(args) => scenario(args, output),
        SimCommand::Train(args) => training::run(args, output),
    }
}

/// What a swarm found.
#[derive(Serialize)]
struct Swarm {
    first_seed: u64,
    worlds: u64,
    passed: u64,
    virtual_seconds: f64,
    events: u64,
    /// How many worlds had each registered component, and how many each kind of event.
    drawn: BTreeMap<String, u64>,
    /// The worlds in which a promise was broken.
    failures: Vec<SeedResult>,
}

fn swarm(args: &SwarmArgs, output: &Output) -> Result<(), Failure> {
    let (first_seed, worlds) = match args.seed {
        Some(seed) => (seed, 1),
        None => (args.first, args.seeds),
    };
    let mut summary = Swarm {
        first_seed,
        worlds: 0,
        passed: 0,
        virtual_seconds: 0.0,
        events: 0,
        drawn: swarm::drawable().into_iter().map(|name| (name, 0)).collect(),
        failures: Vec::new(),
    };
    let mut world = None;
    let mut progress = output.progress(worlds);
    let mut on_result = |result: SeedResult| {
        summary.worlds += 1;
        summary.virtual_seconds += result.seconds;
        summary.events += result.events;
        for name in &result.drawn {
            *summary.drawn.entry(name.clone()).or_default() += 1;
        }
        world = args.seed.map(|_| result.world.clone());
        progress.set(summary.worlds, &format!("worlds, {} broken", summary.failures.len()));
        match result.outcome.is_passed() {
            true => summary.passed += 1,
            false => summary.failures.push(result),
        }
        true
    };
    if args.trace {
        on_result(swarm::trace_seed(first_seed, None, |line| paramill_node::stderr::line(line)));
    } else {
        swarm::run_seeds(first_seed..first_seed.saturating_add(worlds), None, on_result);
    }
    drop(progress);
    summary.failures.sort_by_key(|result| result.seed);
    if output.json() {
        output.object(&summary)?;
    } else {
        output.text(format!(
            "{} of {} worlds kept every promise (seeds {first_seed} to {}; {:.0} s of virtual time, {} events)",
            summary.passed,
            summary.worlds,
            first_seed + worlds - 1,
            summary.virtual_seconds,
            summary.events
        ))?;
        if let Some(world) = &world {
            output.text(format!("in {world}"))?;
        }
        for result in &summary.failures {
            output.text(format!("seed {}: {:?}\n  in {}", result.seed, result.outcome, result.world))?;
        }
    }
    match worst(&summary.failures) {
        None => never_drawn(&summary).map_or(Ok(()), Err),
        Some(worst) => Err(Failure::Found {
            code: worst.outcome.exit_code(),
            what: format!("see the worst again with `paramill sim swarm --seed {}`", worst.seed),
        }),
    }
}

/// A long search that never came to a component has said nothing about it.
fn never_drawn(summary: &Swarm) -> Option<Failure> {
    let missing = summary.drawn.iter().filter(|(_, times)| **times == 0).map(|(name, _)| name.as_str());
    let missing: Vec<&str> = missing.filter(|_| summary.worlds >= FULL_RUN).collect();
    let worlds = summary.worlds;
    (!missing.is_empty())
        .then(|| anyhow!("in {worlds} worlds the swarm never drew {}", missing.join(", ")).into())
}

/// The worst finding, which decides the exit code; of several, the one with the least seed.
fn worst(found: &[SeedResult]) -> Option<&SeedResult> {
    found.iter().max_by_key(|result| (result.outcome.severity(), Reverse(result.seed)))
}

/// A planted bug and where it was found.
#[derive(Serialize)]
struct Caught {
    canary: String,
    found: Option<SeedResult>,
}

/// Plants every bug there is; each must be found.
fn hunt(args: &SwarmArgs, output: &Output) -> Result<(), Failure> {
    let caught: Vec<Caught> = Canary::ALL
        .iter()
        .map(|canary| Caught {
            canary: format!("{canary:?}").to_lowercase(),
            found: swarm::hunt(*canary, args.seed.unwrap_or(args.first), CANARY_TRIES),
        })
        .collect();
    if output.json() {
        output.object(&serde_json::json!({ "canaries": caught }))?;
    } else {
        for Caught { canary, found } in &caught {
            output.text(match found {
                Some(result) => format!("{canary}: found in seed {}: {:?}", result.seed, result.outcome),
                None => format!("{canary}: NOT FOUND in {CANARY_TRIES} worlds"),
            })?;
        }
    }
    match caught.iter().find(|caught| caught.found.is_none()) {
        None => Ok(()),
        Some(missed) => Err(anyhow!("a planted bug was not found: {}", missed.canary).into()),
    }
}

/// A scenario, and its text.
fn read_scenario(file: &Path) -> anyhow::Result<(Scenario, String)> {
    let path = file.display();
    let text = read_text(file).with_context(|| format!("cannot read the scenario {path}"))?;
    let scenario = Scenario::parse(&text).with_context(|| format!("scenario {path}"))?;
    Ok((scenario, text))
}

fn scenario(args: &ScenarioArgs, output: &Output) -> Result<(), Failure> {
    let path = args.scenario.display();
    let (mut scenario, _) = read_scenario(&args.scenario).or_usage()?;
    if let Some(seed) = args.seed {
        scenario.seed = seed;
    }
    if args.sockets {
        scenario.check_untrained().with_context(|| format!("scenario {path}")).or_usage()?;
        return sockets::run(&scenario, output);
    }
    let report = run_scenario(&scenario).with_context(|| format!("scenario {path}")).or_usage()?;
    if output.json() {
        output.object(&report)?;
    } else {
        print(&report, output)?;
    }
    verdict(&report)
}

fn verdict(report: &Report) -> Result<(), Failure> {
    match (report.finished, &report.stalled) {
        (_, Some(why)) => {
            let what = format!("error: {why}");
            Err(Failure::Found { code: Outcome::Liveness(why.clone()).exit_code(), what })
        }
        (true, None) => Ok(()),
        (false, None) => Err(anyhow!("not all workers finished").into()),
    }
}

fn print(report: &Report, output: &Output) -> Result<(), Failure> {
    output.text(format!(
        "seed {}: {} iterations in {:.2} s of virtual time, {} frames",
        report.seed, report.iterations, report.seconds, report.frames
    ))?;
    output.text(format!(
        "{} pushed, {} pulled; {} of {} pulls delayed; staleness {:.2} on average, {} at most",
        bytes(report.bytes_pushed),
        bytes(report.bytes_pulled),
        report.sync.dprs,
        report.sync.pulls,
        report.mean_staleness,
        report.sync.max_staleness
    ))?;
    output.text(format!("{}", report.reads))?;
    if let Some(updates) = report.updates {
        output.text(format!("updates: {updates}"))?;
    }
    let mut workers = Table::new([
        ("worker", Align::Right),
        ("iterations", Align::Right),
        ("computed, s", Align::Right),
        ("waited, s", Align::Right),
        ("state", Align::Left),
    ]);
    for worker in &report.workers {
        workers.row([
            worker.worker.0.to_string(),
            worker.iterations.to_string(),
            format!("{:.2}", worker.computed_s),
            format!("{:.2}", worker.waited_s),
            worker.doing.clone(),
        ]);
    }
    output.table(&workers)?;
    for line in report.waited.lines(output::WAIT_CAUSES) {
        output.text(line)?;
    }
    let mut tables = Table::new([("table", Align::Left), ("hash of the final parameters", Align::Left)]);
    for table in &report.tables {
        tables.row([&table.name, &table.hash]);
    }
    output.table(&tables)?;
    output.text(&report.network)?;
    let mut links = Table::new([
        ("busiest links", Align::Left),
        ("bytes", Align::Right),
        ("busy, s", Align::Right),
        ("load", Align::Right),
    ]);
    for link in report.traffic.iter().take(BUSIEST) {
        links.row([
            link.link.clone(),
            bytes(link.bytes),
            format!("{:.2}", link.busy_s),
            format!("{:.0}%", 100.0 * link.load),
        ]);
    }
    output.table(&links)?;
    for line in &report.log {
        output.text(line)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(seed: u64, outcome: fn(String) -> Outcome) -> SeedResult {
        SeedResult {
            seed,
            outcome: outcome("what".into()),
            world: String::new(),
            seconds: 0.0,
            events: 0,
            drawn: Vec::new(),
        }
    }

    #[test]
    fn a_full_run_that_never_drew_something_fails() {
        let summary = |worlds| Swarm {
            first_seed: 0,
            worlds,
            passed: worlds,
            virtual_seconds: 0.0,
            events: 0,
            drawn: [("codec/topk".to_owned(), 0), ("switch".to_owned(), 3)].into(),
            failures: Vec::new(),
        };
        assert!(never_drawn(&summary(FULL_RUN - 1)).is_none());
        let failure = never_drawn(&summary(FULL_RUN)).unwrap();
        let Failure::Run(error) = failure else { panic!("{failure:?}") };
        assert!(error.to_string().ends_with("the swarm never drew codec/topk"), "{error}");
    }

    #[test]
    fn the_worst_finding_decides_the_exit_code() {
        let results = [
            found(1, Outcome::Liveness),
            found(2, Outcome::Crash),
            found(3, Outcome::Crash),
            found(4, Outcome::Correctness),
            found(5, Outcome::Correctness),
        ];
        let judged = |count| worst(&results[..count]).map(|result| (result.outcome.exit_code(), result.seed));
        assert_eq!([0, 1, 3, 5].map(judged), [None, Some((4, 1)), Some((5, 2)), Some((3, 4))]);
    }
}
