//! FluentPS, Figure 9 and Table IV: delayed pulls and time of SSP and PSSP, lazy and soft.

use super::{Experiment, Report};
use crate::output::{Align, Table};
use crate::plot::{Body, Chart};
use anyhow::Result;
use paramill_sim::reproduce::fluentps_fig9::{self, FluentPsFig9};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "fluentps-fig9",
    about: "FluentPS: lazy execution and PSSP delay up to 97% fewer pulls than SSP with a soft barrier",
    run,
};

fn run(seed: u64) -> Result<Report> {
    let result = fluentps_fig9::run(seed)?;
    Ok(Report {
        title: format!(
            "FluentPS, Figure 9 and Table IV: {} workers, 1 server, {} iterations, {:.0} Gbit/s link, seed {}",
            result.workers, result.iterations, result.link_gbit_per_s, result.seed
        ),
        data: serde_json::to_value(&result)?,
        tables: vec![
            (format!("Per 100 iterations, at a link load of {:.2}", result.base_load), models(&result)),
            (
                "Where the claims about time hold: speed-up by the load of the server's link".into(),
                times(&result),
            ),
        ],
        chart: chart(&result),
        notes: result
            .times
            .iter()
            .map(|time| format!("{}: {}", time.claim, time.verdict))
            .chain(result.notes)
            .collect(),
        findings: result.delays,
    })
}

fn models(result: &FluentPsFig9) -> Table {
    let mut table = Table::new([
        ("sync", Align::Left),
        ("DPRs, paper", Align::Right),
        ("DPRs, ours", Align::Right),
        ("s, paper", Align::Right),
        ("s, ours", Align::Right),
        ("mean staleness read", Align::Right),
        ("max", Align::Right),
    ]);
    let known = |figure: Option<f64>, digits: usize| {
        figure.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
    };
    for row in &result.rows {
        table.row([
            row.sync.clone(),
            known(row.paper_dprs, 0),
            format!("{:.0}", row.dprs),
            known(row.paper_seconds, 1),
            format!("{:.1}", row.seconds),
            format!("{:.2}", row.mean_staleness),
            row.max_staleness.to_string(),
        ]);
    }
    table
}

fn times(result: &FluentPsFig9) -> Table {
    let mut headings = vec![("claim".to_owned(), Align::Left), ("paper".to_owned(), Align::Right)];
    if let Some(first) = result.times.first() {
        headings.extend(first.points.iter().map(|point| (format!("load {:.2}", point.load), Align::Right)));
    }
    let mut table = Table::new(headings);
    for time in &result.times {
        let mut cells = vec![time.claim.to_owned(), format!("{:.2}x", time.paper_ratio)];
        cells.extend(time.points.iter().map(|point| {
            let mark = if point.as_claimed {
                " as claimed"
            } else if point.faster {
                ""
            } else {
                " slower"
            };
            format!("{:.2}x{mark}", point.ratio)
        }));
        table.row(cells);
    }
    table
}

/// The pairs of equal regret bound: PSSP with s = 3 beside SSP with s = 3 + 1/c - 1.
const PAIRS: [(&str, &str, &str); 4] = [
    ("c=1/2, s=4", "pssp:s=3,c=0.5", "ssp:s=4"),
    ("c=1/3, s=5", "pssp:s=3,c=0.3333", "ssp:s=5"),
    ("c=1/5, s=7", "pssp:s=3,c=0.2", "ssp:s=7"),
    ("c=1/10, s=12", "pssp:s=3,c=0.1", "ssp:s=12"),
];

fn chart(result: &FluentPsFig9) -> Chart {
    let dprs = |sync: &str| result.rows.iter().find(|row| row.sync == sync).map_or(0.0, |row| row.dprs);
    let soft = |sync: &str| dprs(&format!("{sync},exec=soft"));
    let series = |figure: &dyn Fn(&(&str, &str, &str)) -> f64| PAIRS.iter().map(figure).collect();
    Chart {
        title: "Delayed pull requests at equal regret bound (FluentPS, Figure 9)".into(),
        x_label: "PSSP(3, c) beside SSP(s)".into(),
        y_label: "DPRs per 100 iterations".into(),
        body: Body::Bars {
            groups: PAIRS.iter().map(|pair| pair.0.to_owned()).collect(),
            series: vec![
                ("PSSP, soft".into(), series(&|pair| soft(pair.1))),
                ("SSP, soft".into(), series(&|pair| soft(pair.2))),
                ("PSSP, lazy".into(), series(&|pair| dprs(pair.1))),
                ("SSP, lazy".into(), series(&|pair| dprs(pair.2))),
            ],
        },
    }
}
