//! FluentPS, Figure 9 and Table IV: delayed pulls and time of SSP and PSSP, under a soft barrier and lazily.
//!
//! 64 workers and one server; the roles are the real ones, nothing is trained. Every worker computes for the same time but
//! for some jitter, and rarely an iteration takes many times as long: a transient straggler. After one, the soft barrier
//! lets fast workers go on as soon as the version moves by one, so that they stay at the bound and are delayed again in
//! every iteration. Lazy execution keeps them until the straggler has caught up, once, and they have their slack back.
//!
//! The paper says neither how its workers straggled nor how busy the server's link was, so both are swept
//! ([`settings`]), and every claim is judged in every setting at the paper's own figure. It holds if more than half of
//! the runs meet it.

mod claims;

use super::Seeds;
use super::claim::{Claim, median};
use crate::compute::ComputeModel;
use crate::network::NetworkConfig;
use crate::report::{Report, run_scenarios};
use crate::scenario::{Scenario, ScenarioError};
use paramill_core::policy::Axis;
use serde::Serialize;

/// Iterations of every worker; figures are given per 100 of them.
pub const ITERATIONS: u64 = 200;

/// How busy the server's link would be, each way, if no worker ever waited. The paper's link carried ASP's traffic in ASP's
/// time, so it was no busier than 1.
const LOADS: [f64; 3] = [0.1, 0.5, 0.9];
/// How much an ordinary iteration varies.
const JITTERS: [f64; 2] = [0.05, 0.25];
/// How often an iteration straggles: some worker of the 64 does in 3, 6 or 12 of 100 rounds. If it were much rarer, some runs
/// would have no straggler at all, and nothing to compare.
const STRAGGLE_PS: [f64; 3] = [0.0005, 0.001, 0.002];
/// How long a straggling iteration takes. Figure 9 has delays under SSP(12), so the paper's took more than 12 others.
const STRAGGLE_FACTORS: [f64; 2] = [14.0, 28.0];

const WORKERS: u32 = 64;
/// An input: Table IV's 45.85 s for 100 iterations of ASP, less some waiting for the link.
const STEP_MS: f64 = 450.0;
const LINK_GBIT_PER_S: f64 = 1.0;
/// Elements that are really exchanged; they stand for as many bytes as the load asks for.
const ELEMENTS: u64 = 128;

/// SSP models of Figure 9, with the PSSP model of equal regret bound.
const PAIRS: [(u64, f64); 4] = [(4, 1.0 / 2.0), (5, 1.0 / 3.0), (7, 1.0 / 5.0), (12, 1.0 / 10.0)];

/// Table IV, AlexNet on CIFAR-10 with 64 workers and one server: seconds and delays per 100 iterations.
const TABLE_IV: [(&str, f64, f64); 11] = [
    ("asp", 45.85, 0.0),
    ("pssp:s=3,c=0.1,exec=soft", 52.95, 23.65),
    ("pssp:s=3,c=0.3,exec=soft", 56.67, 126.1),
    ("pssp:s=3,c=0.5,exec=soft", 58.71, 350.3),
    ("ssp:s=3,exec=soft", 80.77, 4002.0),
    ("pssp:s=3,alpha=1,exec=soft", 72.55, 2670.0),
    ("pssp:s=3,c=0.1", 58.85, 24.80),
    ("pssp:s=3,c=0.3", 60.96, 112.5),
    ("pssp:s=3,c=0.5", 63.89, 254.0),
    ("ssp:s=3", 64.62, 336.8),
    ("pssp:s=3,alpha=1", 62.44, 190.4),
];

/// The reproduction: what was assumed, what came out, which claims hold.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FluentPsFig9 {
    /// Seeds of the runs.
    pub seeds: Seeds,
    /// Workers; there is one server.
    pub workers: u32,
    /// Iterations of every worker.
    pub iterations: u64,
    /// Milliseconds that an ordinary iteration computes: an input, from Table IV's time of ASP.
    pub step_ms: f64,
    /// Rate of every link.
    pub link_gbit_per_s: f64,
    /// Every model: medians over all runs.
    pub models: Vec<Row>,
    /// Every model in every setting with every seed.
    pub runs: Vec<Run>,
    /// The paper's claims.
    pub claims: Vec<Claim>,
    /// What to bear in mind when these figures are held beside the paper's.
    pub notes: Vec<String>,
}

/// What the paper leaves open.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Setting {
    /// How busy the server's link would be, each way, if no worker waited.
    pub load: f64,
    /// How much an ordinary iteration varies.
    pub jitter: f64,
    /// How often an iteration straggles.
    pub straggle_p: f64,
    /// How many times as long a straggling iteration takes.
    pub straggle_factor: f64,
}

/// Every model in one setting with one seed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// The setting.
    pub setting: Setting,
    /// Seed of the run.
    pub seed: u64,
    /// Every model.
    pub rows: Vec<Row>,
}

/// One model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The consistency model.
    pub sync: String,
    /// Delayed pulls per 100 iterations of all workers.
    pub dprs: f64,
    /// Seconds per 100 iterations.
    pub seconds: f64,
    /// Rounds that an answer lacked, on average.
    pub mean_staleness: f64,
    /// Share of the time that the busier direction of the server's link was in use.
    pub link_load: f64,
    /// Table IV's delays, where it has the model.
    pub paper_dprs: Option<f64>,
    /// Table IV's time, where it has the model.
    pub paper_seconds: Option<f64>,
}

/// Every setting of the sweep.
pub fn settings() -> Vec<Setting> {
    let mut settings = Vec::new();
    for load in LOADS {
        for jitter in JITTERS {
            for straggle_p in STRAGGLE_PS {
                let setting = |straggle_factor| Setting { load, jitter, straggle_p, straggle_factor };
                settings.extend(STRAGGLE_FACTORS.map(setting));
            }
        }
    }
    settings
}

/// Runs every model in every setting.
pub fn run(seeds: Seeds) -> Result<FluentPsFig9, ScenarioError> {
    run_with(seeds, ITERATIONS, &settings())
}

/// Runs every model in these settings.
pub fn run_with(seeds: Seeds, iterations: u64, settings: &[Setting]) -> Result<FluentPsFig9, ScenarioError> {
    let models = models();
    let keys: Vec<(u64, Setting)> =
        seeds.clone().flat_map(|seed| settings.iter().map(move |setting| (seed, *setting))).collect();
    let scenarios: Vec<Scenario> = keys
        .iter()
        .flat_map(|(seed, setting)| models.iter().map(|sync| scenario(*seed, iterations, *setting, sync)))
        .collect();
    let reports = run_scenarios(&scenarios)?;
    let rows = |reports: &[Report]| {
        models.iter().zip(reports).map(|(sync, report)| row(sync, iterations, report)).collect()
    };
    let runs: Vec<Run> = keys
        .iter()
        .zip(reports.chunks(models.len()))
        .map(|(&(seed, setting), reports)| Run { setting, seed, rows: rows(reports) })
        .collect();
    Ok(FluentPsFig9 {
        seeds,
        workers: WORKERS,
        iterations,
        step_ms: STEP_MS,
        link_gbit_per_s: LINK_GBIT_PER_S,
        models: models.iter().map(|sync| median_row(sync, &runs)).collect(),
        claims: claims::claims(&runs),
        runs,
        notes: notes(settings.len()),
    })
}

fn notes(settings: usize) -> Vec<String> {
    vec![
        format!(
            "the paper gives no figures for how its workers straggled or how busy the server's link was; {settings} settings \
             are run, which cross loads of {LOADS:?}, jitters of {JITTERS:?}, straggling iterations with probabilities of \
             {STRAGGLE_PS:?} and lengths of {STRAGGLE_FACTORS:?} ordinary ones"
        ),
        "a claim holds if more than half of all runs (settings times seeds) meet the paper's own figure; `met in` says how \
         many do"
            .into(),
        "a load is the share of the time that the server's link would be busy, each way, if no worker waited; waiting \
         lowers it, queues form above it"
            .into(),
        format!("{STEP_MS} ms of computation come from Table IV's time of ASP, so that time is an input"),
    ]
}

/// Every model that Figure 9 or Table IV has.
fn models() -> Vec<String> {
    let mut models: Vec<String> = TABLE_IV.iter().map(|(sync, ..)| (*sync).to_owned()).collect();
    for (s, c) in PAIRS {
        for exec in ["", ",exec=soft"] {
            models.push(format!("ssp:s={s}{exec}"));
            models.push(format!("{}{exec}", pssp(c)));
        }
    }
    models.sort();
    models.dedup();
    models
}

fn pssp(c: f64) -> String {
    format!("pssp:s=3,c={}", (c * 1e4).round() / 1e4)
}

/// Megabytes that a worker exchanges in an iteration, each way, to make a load.
fn megabytes(load: f64) -> f64 {
    load * STEP_MS * 1e-3 * LINK_GBIT_PER_S * 1e3 / 8.0 / f64::from(WORKERS)
}

fn scenario(seed: u64, iterations: u64, setting: Setting, sync: &str) -> Scenario {
    let Setting { load, jitter, straggle_p, straggle_factor } = setting;
    let network = NetworkConfig {
        gbit_per_s: LINK_GBIT_PER_S,
        wire_scale: megabytes(load) * 1e6 / (ELEMENTS * 4) as f64,
        ..NetworkConfig::default()
    };
    // Algorithm 1: every iteration waits for an answer.
    let sync = if sync == "asp" { sync.to_owned() } else { format!("{sync},cache=off") };
    Scenario {
        seed,
        iterations,
        policy: Scenario::default().policy.with(Axis::Sync, sync),
        network,
        compute: ComputeModel {
            step_ms: STEP_MS,
            jitter,
            straggle_p,
            straggle_factor,
            ..ComputeModel::default()
        },
        ..Scenario::new(WORKERS, 1, ELEMENTS)
    }
}

fn row(sync: &str, iterations: u64, report: &Report) -> Row {
    let per_100 = 100.0 / iterations as f64;
    let paper = TABLE_IV.iter().find(|(known, ..)| *known == sync);
    Row {
        sync: sync.to_owned(),
        dprs: report.sync.dprs as f64 * per_100,
        seconds: report.seconds * per_100,
        mean_staleness: report.mean_staleness,
        link_load: report.link_load(),
        paper_seconds: paper.map(|(_, seconds, _)| *seconds),
        paper_dprs: paper.map(|(.., dprs)| *dprs),
    }
}

/// The medians of a model over all runs.
fn median_row(sync: &str, runs: &[Run]) -> Row {
    let over = |figure: fn(&Row) -> f64| {
        median(&runs.iter().map(|run| figure(find(&run.rows, sync))).collect::<Vec<f64>>())
    };
    let paper = TABLE_IV.iter().find(|(known, ..)| *known == sync);
    Row {
        sync: sync.to_owned(),
        dprs: over(|row| row.dprs),
        seconds: over(|row| row.seconds),
        mean_staleness: over(|row| row.mean_staleness),
        link_load: over(|row| row.link_load),
        paper_seconds: paper.map(|(_, seconds, _)| *seconds),
        paper_dprs: paper.map(|(.., dprs)| *dprs),
    }
}

fn find<'a>(rows: &'a [Row], sync: &str) -> &'a Row {
    rows.iter().find(|row| row.sync == sync).expect("every model was run")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Holds the numbers of one seed in one setting: a change here means that a decision changed somewhere.
    #[test]
    fn the_numbers_of_one_seed() {
        let setting = Setting { load: 0.7, jitter: 0.05, straggle_p: 0.0006, straggle_factor: 16.0 };
        let report = run_with(2..3, 200, &[setting]).unwrap();
        let rows = &report.runs[0].rows;
        assert!(rows.iter().all(|row| row.link_load >= 0.3), "{rows:#?}");
        let line =
            |row: &Row| format!("{} {:.1} {:.2} {:.2}", row.sync, row.dprs, row.seconds, row.mean_staleness);
        let ours: Vec<String> = rows.iter().map(line).collect();
        let golden = include_str!("golden/fluentps_fig9.txt").trim_end();
        assert_eq!(ours.join("\n"), golden, "model, delays, seconds, mean staleness");
        assert_eq!(&report.models, rows, "the medians of one run are its figures");
    }
}
