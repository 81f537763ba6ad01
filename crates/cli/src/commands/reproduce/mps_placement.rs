//! MPS, Figures 5.1 to 5.3: what placement does to the servers' load and to the speed-up.

use super::{Experiment, Randomness, Report};
use crate::output::{Align, Table};
use crate::plot::{Body, Chart};
use anyhow::Result;
use paramill_sim::reproduce::mps_placement::{self, MpsPlacement};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "mps-placement",
    about: "MPS, Figures 5.1-5.3: bytes per server under each placement, exact; speed-ups by a formula, not measured",
    randomness: Randomness::None,
    run: |_| report(mps_placement::run()),
};

pub(super) fn report(result: MpsPlacement) -> Result<Report> {
    Ok(Report {
        title: format!(
            "MPS, Figures 5.1-5.3: {} hosts with {} Gbit/s links, a server and a worker on each; nothing is random or run",
            result.hosts, result.link_gbit_per_s
        ),
        data: serde_json::to_value(&result)?,
        tables: vec![
            (
                format!(
                    "Load of the servers, exact; speed-up over one host by the formula, with {} us for a message and all \
                     tensors in flight",
                    result.message_us
                ),
                loads(&result),
            ),
            ("Assumed computation".into(), assumptions(&result)),
        ],
        chart: chart(&result),
        claims: result.claims,
        notes: result.notes,
    })
}

fn loads(result: &MpsPlacement) -> Table {
    let mut table = Table::new([
        ("model", Align::Left),
        ("placement", Align::Left),
        ("MB per server", Align::Left),
        ("CV", Align::Right),
        ("messages", Align::Right),
        ("speed-up (formula)", Align::Right),
    ]);
    for row in &result.rows {
        let megabytes: Vec<String> =
            row.bytes_per_server.iter().map(|bytes| format!("{:.2}", *bytes as f64 / 1e6)).collect();
        table.row([
            row.model.clone(),
            row.placement.clone(),
            megabytes.join(" "),
            format!("{:.3}", row.cv),
            row.messages.to_string(),
            format!("{:.2}", row.predicted_speedup),
        ]);
    }
    table
}

fn assumptions(result: &MpsPlacement) -> Table {
    let mut table = Table::new([
        ("model", Align::Left),
        ("tensors", Align::Right),
        ("elements", Align::Right),
        ("s per step", Align::Right),
        ("from", Align::Left),
    ]);
    for model in &result.models {
        table.row([
            model.model.clone(),
            model.tensors.to_string(),
            model.elements.to_string(),
            format!("{:.4}", model.compute_s),
            model.compute_from.clone(),
        ]);
    }
    table
}

fn chart(result: &MpsPlacement) -> Chart {
    let mut groups: Vec<String> = Vec::new();
    let mut series: Vec<(String, Vec<f64>)> = Vec::new();
    for row in &result.rows {
        if !groups.contains(&row.model) {
            groups.push(row.model.clone());
        }
        match series.iter_mut().find(|(name, _)| *name == row.placement) {
            Some((_, values)) => values.push(row.predicted_speedup),
            None => series.push((row.placement.clone(), vec![row.predicted_speedup])),
        }
    }
    Chart {
        title: "Placement: speed-up on four hosts by a formula (MPS, Figure 5.1)".into(),
        x_label: "model".into(),
        y_label: "speed-up over one host".into(),
        body: Body::Bars { groups, series },
    }
}
