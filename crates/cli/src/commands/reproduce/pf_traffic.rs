//! Parameter Flow, Figures 9 and 10: how much less the network carries with DVF on workers and servers.

mod flow;

use super::{Experiment, Report};
use crate::output::{Align, Table};
use crate::plot::{Body, Chart, Line};
use anyhow::Result;
use flow::{Flow, Traffic};
use paramill_sim::reproduce::Finding;
use serde::Serialize;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "pf-traffic",
    about: "Parameter Flow: DVF on workers and servers saves 45 to 90% of the traffic of LR and MF, BSP and SSP",
    run,
};

const WORKLOADS: [&str; 2] = ["lr", "mf"];
/// Staleness; 0 is BSP.
const STALENESS: [u64; 3] = [0, 4, 16];
/// The part of entries that a threshold drops at the first clock. The paper's thresholds drop 60 to 80% and 40 to 60%
/// of its updates, whose magnitudes are not ours.
const THRESHOLDS: [(&str, f64); 2] = [("delta_up", 0.7), ("delta_low", 0.5)];
/// What the paper reads off its curves: reduced up to so much, by workload, threshold, and BSP or SSP.
const PAPER: [(&str, &str, [f64; 2]); 4] = [
    ("lr", "delta_up", [0.80, 0.70]),
    ("lr", "delta_low", [0.50, 0.46]),
    ("mf", "delta_up", [0.90, 0.80]),
    ("mf", "delta_low", [0.82, 0.61]),
];
const CLOCKS: u64 = 60;

#[derive(Debug, Serialize)]
struct PfTraffic {
    seed: u64,
    workers: u32,
    clocks: u64,
    runs: Vec<Run>,
}

#[derive(Debug, Serialize)]
struct Run {
    workload: &'static str,
    threshold: &'static str,
    delta: f32,
    staleness: u64,
    /// By clock: the part of the traffic that is saved.
    saved: Vec<f64>,
    /// The same over all clocks.
    saved_in_all: f64,
    loss: f64,
    /// The loss without filter.
    plain_loss: f64,
}

fn run(seed: u64) -> Result<Report> {
    let mut runs = Vec::new();
    for workload in WORKLOADS {
        for staleness in STALENESS {
            let plain = Flow::new(workload, seed)?.train("auto", staleness, CLOCKS)?;
            for (threshold, dropped) in THRESHOLDS {
                let mut flow = Flow::new(workload, seed)?;
                let delta = flow.quantile(dropped);
                let Traffic { bytes, dense_bytes, loss } =
                    flow.train(&format!("dvf:delta={delta}+hybrid+snappy"), staleness, CLOCKS)?;
                let saved = bytes.iter().map(|bytes| 1.0 - *bytes as f64 / dense_bytes as f64).collect();
                let all: u64 = bytes.iter().sum();
                let saved_in_all = 1.0 - all as f64 / (dense_bytes * bytes.len() as u64) as f64;
                runs.push(Run {
                    workload,
                    threshold,
                    delta,
                    staleness,
                    saved,
                    saved_in_all,
                    loss,
                    plain_loss: plain.loss,
                });
            }
        }
    }
    let result = PfTraffic { seed, workers: flow::WORKERS, clocks: CLOCKS, runs };
    Ok(Report {
        title: format!(
            "Parameter Flow, Figures 9 and 10: {} workers, {CLOCKS} clocks, made data, seed {seed}",
            flow::WORKERS
        ),
        data: serde_json::to_value(&result)?,
        tables: vec![("Traffic saved against dense pushes and broadcasts".into(), table(&result))],
        findings: findings(&result),
        notes: vec![
            "Workers push filtered updates, servers broadcast the filtered sum (UCC); both keep what they drop. Threshold \
             delta/sqrt(t), then the hybrid container and snappy."
                .into(),
            "Thresholds are set so that 70% and 50% of the first updates' entries are below them: the paper's own belong \
             to its data."
                .into(),
        ],
        chart: chart(&result),
    })
}

fn findings(result: &PfTraffic) -> Vec<Finding> {
    let best = |workload: &str, threshold: &str, bsp: bool| {
        let matches = |run: &&Run| {
            run.workload == workload && run.threshold == threshold && (run.staleness == 0) == bsp
        };
        result.runs.iter().filter(matches).flat_map(|run| run.saved.iter().copied()).fold(0.0, f64::max)
    };
    let mut findings: Vec<Finding> = PAPER
        .iter()
        .flat_map(|(workload, threshold, paper)| {
            paper.iter().zip([true, false]).map(move |(paper, bsp)| (workload, threshold, *paper, bsp))
        })
        .map(|(workload, threshold, paper, bsp)| {
            let ours = best(workload, threshold, bsp);
            Finding {
                claim: format!(
                    "{workload}, {}, {threshold}: up to {:.0}%",
                    if bsp { "BSP" } else { "SSP" },
                    100.0 * paper
                ),
                holds: ours >= paper - 0.1,
                ours: format!("up to {:.0}%", 100.0 * ours),
            }
        })
        .collect();
    let worst = result.runs.iter().map(|run| run.loss / run.plain_loss).fold(0.0, f64::max);
    findings.push(Finding {
        claim: "training does not suffer".into(),
        holds: worst < 1.05,
        ours: format!("the loss is at most {worst:.3} of that without filter"),
    });
    findings
}

fn table(result: &PfTraffic) -> Table {
    let mut table = Table::new([
        ("workload", Align::Left),
        ("threshold", Align::Left),
        ("delta", Align::Right),
        ("model", Align::Left),
        ("first clock", Align::Right),
        ("last clock", Align::Right),
        ("in all", Align::Right),
        ("loss", Align::Right),
        ("without", Align::Right),
    ]);
    for run in &result.runs {
        let percent = |part: f64| format!("{:.0}%", 100.0 * part);
        table.row([
            run.workload.to_owned(),
            run.threshold.to_owned(),
            format!("{:.1e}", run.delta),
            if run.staleness == 0 { "BSP".to_owned() } else { format!("SSP-{}", run.staleness) },
            percent(run.saved.first().copied().unwrap_or(0.0)),
            percent(run.saved.last().copied().unwrap_or(0.0)),
            percent(run.saved_in_all),
            format!("{:.4}", run.loss),
            format!("{:.4}", run.plain_loss),
        ]);
    }
    table
}

fn chart(result: &PfTraffic) -> Chart {
    let line = |run: &Run| Line {
        name: format!("{}, {}", run.workload, run.threshold),
        points: (1..).zip(&run.saved).map(|(clock, saved)| (f64::from(clock), 100.0 * saved)).collect(),
    };
    Chart {
        title: "Traffic saved by DVF under BSP (Parameter Flow, Figure 9)".into(),
        x_label: "clock".into(),
        y_label: "% of the traffic without filter".into(),
        body: Body::Lines(result.runs.iter().filter(|run| run.staleness == 0).map(line).collect()),
    }
}
