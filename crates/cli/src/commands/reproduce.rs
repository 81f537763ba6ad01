//! `paramill reproduce`: a published result set up again, with the paper's figures beside ours.

mod fluentps_fig9;
mod mps_placement;
mod pf_snappy;
mod pf_traffic;
mod psp_table1;

use crate::args::ReproduceArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::{Align, Output, Table};
use crate::plot::{self, Chart};
use anyhow::{Result, anyhow};
use paramill_sim::reproduce::Finding;
use serde::Serialize;

/// A result that can be set up. A new one is a file here and a line in [`EXPERIMENTS`].
struct Experiment {
    name: &'static str,
    /// One sentence: what the paper found.
    about: &'static str,
    run: fn(seed: u64) -> Result<Report>,
}

/// What came of it.
struct Report {
    title: String,
    /// Everything, for programs.
    data: serde_json::Value,
    /// The paper's figures beside ours, each table under a sentence.
    tables: Vec<(String, Table)>,
    findings: Vec<Finding>,
    notes: Vec<String>,
    chart: Chart,
}

const EXPERIMENTS: &[Experiment] = &[
    mps_placement::EXPERIMENT,
    fluentps_fig9::EXPERIMENT,
    psp_table1::EXPERIMENT,
    pf_snappy::EXPERIMENT,
    pf_traffic::EXPERIMENT,
];

/// Lists the results, or sets one up.
pub(crate) fn run(args: &ReproduceArgs, output: &Output) -> Result<(), Failure> {
    let Some(name) = &args.name else { return list(output) };
    let experiment = find(name).or_usage()?;
    if let Some(path) = &args.plot {
        plot::check(path).or_usage()?;
    }
    let mut progress = output.progress(1);
    progress.set(0, &format!("{name}, seed {}", args.seed));
    let report = (experiment.run)(args.seed)?;
    drop(progress);
    if let Some(path) = &args.plot {
        report.chart.write(path)?;
    }
    print(&report, output)
}

fn find(name: &str) -> Result<&'static Experiment> {
    let known = || EXPERIMENTS.iter().map(|experiment| experiment.name).collect::<Vec<_>>().join(", ");
    let found = EXPERIMENTS.iter().find(|experiment| experiment.name == name);
    found.ok_or_else(|| anyhow!("unknown result `{name}`; known: {}", known()))
}

#[derive(Serialize)]
struct Listing {
    results: Vec<Listed>,
}

#[derive(Serialize)]
struct Listed {
    name: &'static str,
    about: &'static str,
}

fn list(output: &Output) -> Result<(), Failure> {
    let listed = |experiment: &Experiment| Listed { name: experiment.name, about: experiment.about };
    let listing = Listing { results: EXPERIMENTS.iter().map(listed).collect() };
    if output.json() {
        return Ok(output.object(&listing)?);
    }
    let mut table = Table::new([("name", Align::Left), ("what the paper found", Align::Left)]);
    for result in &listing.results {
        table.row([result.name, result.about]);
    }
    Ok(output.table(&table)?)
}

fn print(report: &Report, output: &Output) -> Result<(), Failure> {
    if output.json() {
        return Ok(output.object(&report.data)?);
    }
    output.text(&report.title)?;
    for (caption, table) in &report.tables {
        output.text(format!("\n{caption}"))?;
        output.table(table)?;
    }
    output.text("\nWhat the paper found, and whether it is so here")?;
    let mut table = Table::new([("", Align::Left), ("paper", Align::Left), ("ours", Align::Left)]);
    for finding in &report.findings {
        table.row([if finding.holds { "holds" } else { "DOES NOT HOLD" }, &finding.claim, &finding.ours]);
    }
    output.table(&table)?;
    for note in &report.notes {
        output.text(format!("- {note}"))?;
    }
    Ok(())
}
