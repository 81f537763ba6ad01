//! `paramill reproduce`: a published result set up again, with the paper's figures beside ours.

use crate::args::ReproduceArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::{Align, Output, Table};
use crate::plot::Chart;
use anyhow::{Result, anyhow};
use serde::Serialize;

/// A result that can be set up. A new one is a function and a line in [`EXPERIMENTS`].
struct Experiment {
    name: &'static str,
    /// One sentence: what the paper found.
    about: &'static str,
    run: fn(seed: u64, output: &Output) -> Result<Report>,
}

/// What came of it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) title: String,
    /// The paper's figures beside ours.
    pub(crate) rows: Vec<Row>,
    /// What was assumed, and where a claim holds or does not.
    pub(crate) notes: Vec<String>,
    #[serde(skip)]
    pub(crate) chart: Option<Chart>,
}

/// One figure.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) what: String,
    /// The paper's; `None` where it gives none.
    pub(crate) paper: Option<f64>,
    pub(crate) ours: f64,
    pub(crate) unit: &'static str,
}

const EXPERIMENTS: &[Experiment] = &[];

/// Lists the results, or sets one up.
pub(crate) fn run(args: &ReproduceArgs, output: &Output) -> Result<(), Failure> {
    let Some(name) = &args.name else { return list(output) };
    let experiment = find(name).or_usage()?;
    let report = (experiment.run)(args.seed, output)?;
    if let Some(path) = &args.plot {
        let chart = report.chart.as_ref().ok_or_else(|| anyhow!("{name} has no plot"))?;
        chart.write(path)?;
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
        return Ok(output.object(report)?);
    }
    output.text(&report.title)?;
    let mut table = Table::new([
        ("", Align::Left),
        ("paper", Align::Right),
        ("ours", Align::Right),
        ("unit", Align::Left),
    ]);
    for row in &report.rows {
        let paper = row.paper.map_or("-".to_owned(), figure);
        table.row([row.what.as_str(), &paper, &figure(row.ours), row.unit]);
    }
    output.table(&table)?;
    for note in &report.notes {
        output.text(format!("- {note}"))?;
    }
    Ok(())
}

/// Three significant digits: more would claim more than a simulation knows.
fn figure(value: f64) -> String {
    let digits = match value.abs() {
        0.0..10.0 => 3,
        10.0..100.0 => 2,
        100.0..1000.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}
