//! PSP-SGD, Table 1: how much time partial pushing and partial pulling save when a few answers are late.
//!
//! 32 workers and 32 servers, 880 iterations of 9.5 s (90 epochs of CIFAR-10 in batches of 5120, in the time that the
//! paper's fastest run took for them), and 0.16% of the answers to pulls late by 4 s. The roles are the real ones;
//! links have no limit, because the 9.5 s already hold the paper's communication.
//!
//! The paper does not say how many answers a worker gets in an iteration, and that number decides how often somebody
//! is late. Here it is tables times servers, since a server answers for each table; 64 is assumed, and the effect of
//! other numbers is shown.

use super::Finding;
use crate::compute::ComputeModel;
use crate::network::NetworkConfig;
use crate::report::{Report, run_scenarios};
use crate::scenario::{Scenario, ScenarioError, TableConfig};
use serde::Serialize;

/// The paper's 90 epochs.
pub const ITERATIONS: u64 = 880;

const NODES: u32 = 32;
const ITERATION_S: f64 = 9.5;
const LATE: &str = "pull:delay=4s,p=0.0016";
/// Two answers per server: the one free assumption.
const TABLES: u32 = 2;
/// Other numbers of tables, and the share of the iterations that each of them does.
const SWEEP_TABLES: [u32; 3] = [1, 3, 4];
const SWEEP_SHARE: u64 = 8;
/// How far from the paper's ratios ours may be.
const TOLERANCE: f64 = 0.08;

/// One column of the paper's table.
struct Column {
    name: &'static str,
    sync: &'static str,
    paper_minutes: f64,
}

const COLUMNS: [Column; 4] = [
    Column { name: "synchronous", sync: "bsp", paper_minutes: 199.97 },
    Column { name: "push 28", sync: "psp:c=28", paper_minutes: 164.97 },
    Column { name: "push 28, pull 90%", sync: "psp:c=28,b=0.9", paper_minutes: 139.95 },
    Column { name: "push 20, pull 75%", sync: "psp:c=20,b=0.75", paper_minutes: 136.54 },
];

/// The reproduction: what was assumed, what came out, and what the free assumption does.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PspTable1 {
    /// Seed of the run.
    pub seed: u64,
    /// Workers, and servers.
    pub nodes: u32,
    /// Iterations of every worker.
    pub iterations: u64,
    /// Time of an iteration without late answers.
    pub iteration_s: f64,
    /// The fault, in the words of `--inject`.
    pub fault: &'static str,
    /// Answers that a worker gets in an iteration: the one free assumption.
    pub responses: u32,
    /// The paper's columns.
    pub rows: Vec<Row>,
    /// The paper's ratios and whether ours are close.
    pub paper: Vec<Finding>,
    /// The ratios under other assumptions.
    pub sweep: Vec<SweepPoint>,
    /// What to bear in mind when these figures are held beside the paper's.
    pub notes: Vec<String>,
}

/// One column of Table 1.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// What the paper calls it.
    pub name: &'static str,
    /// The consistency model.
    pub sync: &'static str,
    /// Our running time.
    pub minutes: f64,
    /// Ours relative to synchronous.
    pub relative: f64,
    /// The paper's running time.
    pub paper_minutes: f64,
    /// The paper's relative to synchronous.
    pub paper_relative: f64,
    /// Gradients that came too late for their round, of all that were pushed.
    pub dropped: f64,
}

/// The ratios with another number of answers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SweepPoint {
    /// Answers that a worker gets in an iteration.
    pub responses: u32,
    /// Time of a synchronous iteration.
    pub synchronous_iteration_s: f64,
    /// Times relative to synchronous, in the order of the rows.
    pub relative: Vec<f64>,
    /// Whether all are within the tolerance of the paper's.
    pub within_tolerance: bool,
}

/// Runs everything.
pub fn run(seed: u64) -> Result<PspTable1, ScenarioError> {
    run_with(seed, ITERATIONS)
}

/// Runs everything with another number of iterations.
pub fn run_with(seed: u64, iterations: u64) -> Result<PspTable1, ScenarioError> {
    let sweep_iterations = (iterations / SWEEP_SHARE).max(1);
    let mut scenarios: Vec<Scenario> =
        COLUMNS.iter().map(|column| scenario(seed, column.sync, TABLES, iterations)).collect();
    for tables in SWEEP_TABLES {
        scenarios.extend(COLUMNS.iter().map(|column| scenario(seed, column.sync, tables, sweep_iterations)));
    }
    let reports = run_scenarios(&scenarios)?;
    let (main, sweep) = reports.split_at(COLUMNS.len());
    let rows = rows(main);
    let swept = SWEEP_TABLES.iter().zip(sweep.chunks(COLUMNS.len()));
    let mut sweep: Vec<SweepPoint> =
        swept.map(|(&tables, reports)| sweep_point(tables, sweep_iterations, reports)).collect();
    sweep.push(sweep_point(TABLES, iterations, main));
    sweep.sort_by_key(|point| point.responses);
    Ok(PspTable1 {
        seed,
        nodes: NODES,
        iterations,
        iteration_s: ITERATION_S,
        fault: LATE,
        responses: TABLES * NODES,
        paper: rows[1..].iter().map(finding).collect(),
        rows,
        sweep,
        notes: vec![
            format!(
                "points of the sweep beside {} answers do {sweep_iterations} of the {iterations} iterations",
                TABLES * NODES
            ),
            "the paper's validation errors are not part of this: nothing is trained here".into(),
        ],
    })
}

fn scenario(seed: u64, sync: &str, tables: u32, iterations: u64) -> Scenario {
    let table =
        |number| TableConfig { name: format!("block{number}"), shape: vec![NODES.into()], rows: false };
    Scenario {
        seed,
        iterations,
        sync: sync.into(),
        placement: "uniform".into(),
        colocated: true,
        tables: (0..tables).map(table).collect(),
        faults: vec![LATE.into()],
        network: NetworkConfig { gbit_per_s: 0.0, ..NetworkConfig::default() },
        compute: ComputeModel { step_ms: ITERATION_S * 1e3, jitter: 0.001, ..ComputeModel::default() },
        ..Scenario::new(NODES, NODES, 1)
    }
}

fn rows(reports: &[Report]) -> Vec<Row> {
    let row = |(column, report): (&Column, &Report)| Row {
        name: column.name,
        sync: column.sync,
        minutes: report.seconds / 60.0,
        relative: report.seconds / reports[0].seconds,
        paper_minutes: column.paper_minutes,
        paper_relative: column.paper_relative(),
        dropped: report.sync.dropped as f64 / (report.sync.pushes + report.sync.dropped).max(1) as f64,
    };
    COLUMNS.iter().zip(reports).map(row).collect()
}

impl Column {
    fn paper_relative(&self) -> f64 {
        self.paper_minutes / COLUMNS[0].paper_minutes
    }
}

fn finding(row: &Row) -> Finding {
    Finding {
        claim: format!("{}: {:.3} of the synchronous time", row.name, row.paper_relative),
        holds: (row.relative - row.paper_relative).abs() <= TOLERANCE,
        ours: format!("{:.3} ({:.1} min)", row.relative, row.minutes),
    }
}

fn sweep_point(tables: u32, iterations: u64, reports: &[Report]) -> SweepPoint {
    let rows = rows(reports);
    SweepPoint {
        responses: tables * NODES,
        synchronous_iteration_s: reports[0].seconds / iterations as f64,
        relative: rows.iter().map(|row| row.relative).collect(),
        within_tolerance: rows.iter().all(|row| (row.relative - row.paper_relative).abs() <= TOLERANCE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_run_has_the_papers_order_and_size() {
        let report = run_with(1, 32).unwrap();
        let relative: Vec<f64> = report.rows.iter().map(|row| row.relative).collect();
        assert_eq!(relative[0], 1.0);
        assert!(relative[1] < 0.95 && relative[2] < relative[1] - 0.05, "{relative:?}");
        for row in &report.rows[1..] {
            assert!((row.relative - row.paper_relative).abs() < 0.12, "{row:?}");
        }
        assert_eq!(report.rows[1].dropped, 0.125, "28 of 32 gradients make a round");
    }

    #[test]
    fn more_answers_make_a_synchronous_iteration_longer() {
        let report = run_with(2, 64).unwrap();
        let times: Vec<f64> = report.sweep.iter().map(|point| point.synchronous_iteration_s).collect();
        assert!(times[0] >= ITERATION_S && times[0] <= times[3] + 0.5, "{times:?}");
        assert_eq!(report.sweep.iter().map(|point| point.responses).collect::<Vec<_>>(), [32, 64, 96, 128]);
    }
}
