//! FluentPS, Figure 9 and Table IV: delayed pulls and time of SSP and PSSP, lazy and soft.

use super::{Experiment, Randomness, Report, named};
use crate::output::{Align, Table};
use crate::plot::{Body, Chart};
use anyhow::Result;
use paramill_sim::reproduce::claim::median;
use paramill_sim::reproduce::fluentps_fig9::{self, FluentPsFig9, Run};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "fluentps-fig9",
    about: "FluentPS, Figure 9 and Table IV: delayed pulls and times of SSP and PSSP, simulated without training in 36 settings",
    randomness: Randomness::ManySeeds,
    run: |seeds| report(fluentps_fig9::run(seeds)?),
};

pub(super) fn report(result: FluentPsFig9) -> Result<Report> {
    Ok(Report {
        title: format!(
            "FluentPS, Figure 9 and Table IV: {} workers and 1 server in virtual time, {} iterations, {:.0} Gbit/s link, \
             {} runs (settings times seeds), {}",
            result.workers,
            result.iterations,
            result.link_gbit_per_s,
            result.runs.len(),
            named(&result.seeds)
        ),
        data: serde_json::to_value(&result)?,
        tables: vec![
            ("Per 100 iterations, medians over all runs".into(), models(&result)),
            (
                "Speed-ups by the load of the server's link, medians over the other settings".into(),
                times(&result),
            ),
        ],
        chart: chart(&result),
        claims: result.claims,
        notes: result.notes,
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
    ]);
    let known = |figure: Option<f64>, digits: usize| {
        figure.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
    };
    for row in &result.models {
        table.row([
            row.sync.clone(),
            known(row.paper_dprs, 0),
            format!("{:.0}", row.dprs),
            known(row.paper_seconds, 1),
            format!("{:.1}", row.seconds),
            format!("{:.2}", row.mean_staleness),
        ]);
    }
    table
}

/// The pairs of models that the paper's claims on time compare: the slower one, the faster one, and how much faster it is.
const TIMES: [(&str, &str, &str); 4] = [
    ("ssp:s=3,exec=soft", "ssp:s=3", "1.25x"),
    ("ssp:s=12,exec=soft", "ssp:s=12", "up to 1.24x"),
    ("ssp:s=3,exec=soft", "pssp:s=3,c=0.5,exec=soft", "1.38x"),
    ("ssp:s=12,exec=soft", "pssp:s=3,c=0.1,exec=soft", "1.40x"),
];

fn times(result: &FluentPsFig9) -> Table {
    let mut loads: Vec<f64> = result.runs.iter().map(|run| run.setting.load).collect();
    loads.sort_by(f64::total_cmp);
    loads.dedup();
    let mut headings = vec![
        ("".to_owned(), Align::Left),
        ("against".to_owned(), Align::Left),
        ("paper".to_owned(), Align::Right),
    ];
    headings.extend(loads.iter().map(|load| (format!("load {load:.1}"), Align::Right)));
    let mut table = Table::new(headings);
    for (slow, fast, paper) in TIMES {
        let mut cells = vec![fast.to_owned(), slow.to_owned(), paper.to_owned()];
        cells.extend(loads.iter().map(|load| format!("{:.2}x", speedup(result, *load, slow, fast))));
        table.row(cells);
    }
    table
}

/// The median ratio of two models' times over the runs at a load.
fn speedup(result: &FluentPsFig9, load: f64, slow: &str, fast: &str) -> f64 {
    let seconds = |run: &Run, sync: &str| {
        run.rows.iter().find(|row| row.sync == sync).map_or(f64::NAN, |row| row.seconds)
    };
    let at_load = result.runs.iter().filter(|run| run.setting.load == load);
    median(&at_load.map(|run| seconds(run, slow) / seconds(run, fast)).collect::<Vec<f64>>())
}

/// The pairs of equal regret bound: PSSP with s = 3 beside SSP with s = 3 + 1/c - 1.
const PAIRS: [(&str, &str, &str); 4] = [
    ("c=1/2, s=4", "pssp:s=3,c=0.5", "ssp:s=4"),
    ("c=1/3, s=5", "pssp:s=3,c=0.3333", "ssp:s=5"),
    ("c=1/5, s=7", "pssp:s=3,c=0.2", "ssp:s=7"),
    ("c=1/10, s=12", "pssp:s=3,c=0.1", "ssp:s=12"),
];

fn chart(result: &FluentPsFig9) -> Chart {
    let dprs = |sync: &str| result.models.iter().find(|row| row.sync == sync).map_or(0.0, |row| row.dprs);
    let soft = |sync: &str| dprs(&format!("{sync},exec=soft"));
    let series = |figure: &dyn Fn(&(&str, &str, &str)) -> f64| PAIRS.iter().map(figure).collect();
    Chart {
        title: "Delayed pull requests at equal regret bound (FluentPS, Figure 9)".into(),
        x_label: "PSSP(3, c) beside SSP(s)".into(),
        y_label: "DPRs per 100 iterations, median".into(),
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
