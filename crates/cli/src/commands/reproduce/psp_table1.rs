//! PSP-SGD, Table 1: rare late answers, and what partial pushing and pulling save.

use super::{Experiment, Report};
use crate::output::{Align, Table};
use crate::plot::{Body, Chart};
use anyhow::Result;
use paramill_sim::reproduce::psp_table1::{self, PspTable1};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "psp-table1",
    about: "PSP-SGD: with 0.16% of answers late by 4 s, partial pushing and pulling take 0.83 and 0.70 of the time",
    run,
};

fn run(seed: u64) -> Result<Report> {
    let result = psp_table1::run(seed)?;
    Ok(Report {
        title: format!(
            "PSP-SGD, Table 1: {0} workers and {0} servers, {1} iterations of {2} s, fault `{3}`, seed {4}",
            result.nodes, result.iterations, result.iteration_s, result.fault, result.seed
        ),
        data: serde_json::to_value(&result)?,
        tables: vec![
            (
                format!("Assumed: {} answers for each worker and iteration", result.responses),
                columns(&result),
            ),
            ("The effect of that assumption: times relative to synchronous".into(), sweep(&result)),
        ],
        chart: chart(&result),
        findings: result.paper,
        notes: result.notes,
    })
}

fn columns(result: &PspTable1) -> Table {
    let mut table = Table::new([
        ("", Align::Left),
        ("sync", Align::Left),
        ("paper, min", Align::Right),
        ("ours, min", Align::Right),
        ("paper, relative", Align::Right),
        ("ours, relative", Align::Right),
        ("gradients dropped", Align::Right),
    ]);
    for row in &result.rows {
        table.row([
            row.name.to_owned(),
            row.sync.to_owned(),
            format!("{:.1}", row.paper_minutes),
            format!("{:.1}", row.minutes),
            format!("{:.3}", row.paper_relative),
            format!("{:.3}", row.relative),
            format!("{:.1}%", 100.0 * row.dropped),
        ]);
    }
    table
}

fn sweep(result: &PspTable1) -> Table {
    let mut headings =
        vec![("answers".to_owned(), Align::Right), ("s per synchronous iteration".to_owned(), Align::Right)];
    headings.extend(result.rows.iter().skip(1).map(|row| (row.name.to_owned(), Align::Right)));
    headings.push(("all within 0.08".to_owned(), Align::Left));
    let mut table = Table::new(headings);
    for point in &result.sweep {
        let mut cells = vec![point.responses.to_string(), format!("{:.2}", point.synchronous_iteration_s)];
        cells.extend(point.relative.iter().skip(1).map(|relative| format!("{relative:.3}")));
        cells.push(if point.within_tolerance { "yes" } else { "no" }.to_owned());
        table.row(cells);
    }
    table
}

fn chart(result: &PspTable1) -> Chart {
    let figures = |figure: fn(&psp_table1::Row) -> f64| result.rows.iter().map(figure).collect();
    Chart {
        title: "Time relative to synchronous SGD (PSP-SGD, Table 1)".into(),
        x_label: "setting".into(),
        y_label: "relative time".into(),
        body: Body::Bars {
            groups: result.rows.iter().map(|row| row.name.to_owned()).collect(),
            series: vec![
                ("paper".into(), figures(|row| row.paper_relative)),
                ("ours".into(), figures(|row| row.relative)),
            ],
        },
    }
}
