//! `paramill reproduce`: parts of a published experiment, each claim of the paper with its figure beside ours.

mod fluentps_fig9;
mod mps_placement;
mod pf_snappy;
mod pf_traffic;
mod psp_table1;

use crate::args::ReproduceArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::{Align, Output, Table};
use crate::plot::{self, Chart};
use anyhow::{Result, anyhow, bail};
use paramill_sim::reproduce::claim::Verdict;
use paramill_sim::reproduce::{Claim, Seeds};
use serde::Serialize;

/// An experiment that can be set up. A new one is a file here and a line in [`EXPERIMENTS`].
struct Experiment {
    name: &'static str,
    /// One sentence: what is set up, and what stands in for what.
    about: &'static str,
    randomness: Randomness,
    run: fn(Seeds) -> Result<Report>,
}

/// What a seed means to an experiment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Randomness {
    /// Nothing is random.
    None,
    /// One seed draws the data.
    OneSeed,
    /// Claims can be judged over several seeds.
    ManySeeds,
}

/// What came of it.
struct Report {
    title: String,
    /// Everything, for programs; `claims` is one of its fields.
    data: serde_json::Value,
    /// Figures, each table under a sentence.
    tables: Vec<(String, Table)>,
    claims: Vec<Claim>,
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

/// Lists the experiments, or sets one up.
pub(crate) fn run(args: &ReproduceArgs, output: &Output) -> Result<(), Failure> {
    let Some(name) = &args.name else { return list(output) };
    let experiment = find(name).or_usage()?;
    let seeds = seeds(experiment, args).or_usage()?;
    if let Some(path) = &args.plot {
        plot::check(path).or_usage()?;
    }
    let mut progress = output.progress(1);
    progress.set(0, name);
    let report = (experiment.run)(seeds)?;
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

/// The seeds that were asked for; an option that would have no effect is refused.
fn seeds(experiment: &Experiment, args: &ReproduceArgs) -> Result<Seeds> {
    let Experiment { name, randomness, .. } = experiment;
    if *randomness == Randomness::None && (args.seed.is_some() || args.seeds.is_some()) {
        bail!("nothing is random in {name}; leave --seed and --seeds out");
    }
    if *randomness == Randomness::OneSeed && args.seeds.is_some() {
        bail!("{name} draws its data from one seed; leave --seeds out, or give --seed");
    }
    let (first, count) = (args.seed.unwrap_or(1), args.seeds.unwrap_or(1));
    let end = first.checked_add(count).ok_or_else(|| anyhow!("--seed {first} is too large"))?;
    Ok(first..end)
}

/// Seeds, for a title.
fn named(seeds: &Seeds) -> String {
    match seeds.end - seeds.start {
        1 => format!("seed {}", seeds.start),
        _ => format!("seeds {} to {}", seeds.start, seeds.end - 1),
    }
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
    let mut table = Table::new([("name", Align::Left), ("what is set up", Align::Left)]);
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
    output.text("\nThe paper's claims, judged at its own figures")?;
    output.table(&claims_table(&report.claims))?;
    output.text(summary(&report.claims))?;
    for reason in reasons(&report.claims) {
        output.text(format!("- {reason}"))?;
    }
    output.text("\nNotes")?;
    for note in &report.notes {
        output.text(format!("- {note}"))?;
    }
    Ok(())
}

fn claims_table(claims: &[Claim]) -> Table {
    let columns = ["#", "claim", "paper", "ours", "holds"];
    let mut table = Table::new(columns.map(|title| (title, Align::Left)));
    for (number, claim) in (1..).zip(claims) {
        let holds = match claim.verdict {
            Verdict::Holds => "yes",
            Verdict::Fails(_) => "NO",
            Verdict::Open(_) => "not judged",
        };
        table.row([number.to_string().as_str(), &claim.claim, &claim.paper, &claim.ours, holds]);
    }
    table
}

fn summary(claims: &[Claim]) -> String {
    let count = |verdict: fn(&Verdict) -> bool| claims.iter().filter(|claim| verdict(&claim.verdict)).count();
    format!(
        "{} claims: {} hold, {} do not, {} cannot be judged here",
        claims.len(),
        count(|verdict| matches!(verdict, Verdict::Holds)),
        count(|verdict| matches!(verdict, Verdict::Fails(_))),
        count(|verdict| matches!(verdict, Verdict::Open(_))),
    )
}

/// Every reason once, after the numbers of the claims that it is for.
fn reasons(claims: &[Claim]) -> Vec<String> {
    let mut reasons: Vec<(&str, &str, Vec<String>)> = Vec::new();
    for (number, claim) in (1..).zip(claims) {
        let (verdict, why) = match &claim.verdict {
            Verdict::Fails(Some(why)) => ("does not hold", why),
            Verdict::Open(why) => ("not judged", why),
            Verdict::Holds | Verdict::Fails(None) => continue,
        };
        let number = i32::to_string(&number);
        match reasons.iter_mut().find(|(known, reason, _)| *known == verdict && reason == why) {
            Some((.., numbers)) => numbers.push(number),
            None => reasons.push((verdict, why, vec![number])),
        }
    }
    let sentence = |(verdict, why, numbers): (&str, &str, Vec<String>)| {
        format!("{}: {verdict}: {why}", numbers.join(", "))
    };
    reasons.into_iter().map(sentence).collect()
}

#[cfg(test)]
mod tests;
