//! PSP-SGD, Table 1: rare late answers, and what partial pushing and pulling save.

use super::{Experiment, Randomness, Report, named};
use crate::output::{Align, Table};
use crate::plot::{Body, Chart};
use anyhow::Result;
use paramill_sim::reproduce::psp_table1::{self, PspTable1};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "psp-table1",
    about: "PSP-SGD, Table 1: running times with rare late answers, simulated without training; one column is an input",
    randomness: Randomness::ManySeeds,
    run: |seeds| report(psp_table1::run(seeds)?),
};

pub(super) fn report(result: PspTable1) -> Result<Report> {
    Ok(Report {
        title: format!(
            "PSP-SGD, Table 1: {0} workers and {0} servers in virtual time, {1} iterations of {2:.2} s scaled to the paper's \
             {3}, fault `{4}`, {5}",
            result.nodes,
            result.iterations,
            result.iteration_s,
            psp_table1::PAPER_ITERATIONS,
            result.fault,
            named(&result.seeds)
        ),
        data: serde_json::to_value(&result)?,
        tables: vec![
            ("Medians over all runs".into(), columns(&result)),
            (
                "By the number of answers for each worker and iteration, which the paper does not give: times relative to \
                 synchronous"
                    .into(),
                runs(&result),
            ),
        ],
        chart: chart(&result),
        claims: result.claims,
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
    for column in &result.columns {
        table.row([
            column.name.to_owned(),
            column.sync.to_owned(),
            format!("{:.1}", column.paper_minutes),
            format!("{:.1}", column.minutes),
            format!("{:.3}", column.paper_relative),
            format!("{:.3}", column.relative),
            format!("{:.1}%", 100.0 * column.dropped),
        ]);
    }
    table
}

fn runs(result: &PspTable1) -> Table {
    let mut headings = vec![
        ("answers".to_owned(), Align::Right),
        ("seed".to_owned(), Align::Right),
        ("undelayed, min".to_owned(), Align::Right),
        ("synchronous, min".to_owned(), Align::Right),
    ];
    headings.extend(result.columns.iter().skip(1).map(|column| (column.name.to_owned(), Align::Right)));
    let mut table = Table::new(headings);
    for run in &result.runs {
        let mut cells = vec![
            run.responses.to_string(),
            run.seed.to_string(),
            format!("{:.1}", run.undelayed_minutes),
            format!("{:.1}", run.minutes.first().copied().unwrap_or(f64::NAN)),
        ];
        cells.extend(run.relative.iter().skip(1).map(|relative| format!("{relative:.3}")));
        table.row(cells);
    }
    table
}

fn chart(result: &PspTable1) -> Chart {
    let figures = |figure: fn(&psp_table1::ColumnResult) -> f64| result.columns.iter().map(figure).collect();
    Chart {
        title: "Time relative to synchronous SGD (PSP-SGD, Table 1)".into(),
        x_label: "setting".into(),
        y_label: "relative time".into(),
        body: Body::Bars {
            groups: result.columns.iter().map(|column| column.name.to_owned()).collect(),
            series: vec![
                ("paper".into(), figures(|column| column.paper_relative)),
                ("ours".into(), figures(|column| column.relative)),
            ],
        },
    }
}
