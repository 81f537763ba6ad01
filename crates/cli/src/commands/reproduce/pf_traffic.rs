//! Parameter Flow, Figures 9 and 10: how much less the network carries with DVF on workers and servers.
//!
//! Models and data are thousands of times smaller than the paper's, and the loop that trains them ([`flow`]) is not the
//! system: `docs/broadcast.md` has figures of that. The saving follows from the threshold `delta` in relation to the magnitude of
//! updates, which depends on the data, the batch and the learning rate. The paper's thresholds fit its own. So `delta` is
//! swept here, and no value of it is chosen.

mod flow;

use super::{Experiment, Randomness, Report, named};
use crate::output::{Align, Table};
use crate::plot::{Body, Chart, Line};
use anyhow::Result;
use flow::{Flow, Traffic};
use paramill_sim::reproduce::claim::{Bar, median, percent, spread};
use paramill_sim::reproduce::{Claim, Seeds};
use serde::Serialize;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "pf-traffic",
    about: "Parameter Flow, Figures 9 and 10: traffic that DVF saves, by its threshold, for tiny LR and MF in a loop of its own",
    randomness: Randomness::ManySeeds,
    run: |seeds| report(run(seeds, CLOCKS, &DELTAS)?),
};

const CLOCKS: u64 = 60;
const PAPER_WORKERS: u32 = 40;
/// Staleness; 0 is BSP.
const STALENESS: [u64; 3] = [0, 4, 16];
/// Thresholds of the first clock. Those of the paper are among them.
const DELTAS: [f32; 10] = [5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2];

/// A model of the paper that is run here in a small form.
struct Model {
    workload: &'static str,
    /// Parameters of the paper's (Table 2).
    paper_parameters: &'static str,
    /// The paper's data.
    paper_data: &'static str,
    /// The first clock that the paper's figure for BSP is about.
    from_clock: u64,
    thresholds: [Threshold; 2],
}

/// One of the paper's two thresholds of a model.
struct Threshold {
    name: &'static str,
    delta: f32,
    /// "Up to" this much traffic is saved under BSP, and under SSP.
    saved: [f64; 2],
}

const MODELS: [Model; 2] = [
    Model {
        workload: "lr",
        paper_parameters: "105M",
        paper_data: "680M clicks of Criteo",
        from_clock: 0,
        thresholds: [
            Threshold { name: "delta_up", delta: 2e-4, saved: [0.80, 0.70] },
            Threshold { name: "delta_low", delta: 1e-4, saved: [0.50, 0.46] },
        ],
    },
    Model {
        workload: "mf",
        paper_parameters: "16.3M",
        paper_data: "22M ratings of MovieLens",
        from_clock: 30,
        thresholds: [
            Threshold { name: "delta_up", delta: 1e-3, saved: [0.90, 0.80] },
            Threshold { name: "delta_low", delta: 5e-4, saved: [0.82, 0.61] },
        ],
    },
];

#[derive(Debug, Serialize)]
pub(super) struct PfTraffic {
    seeds: Seeds,
    workers: u32,
    clocks: u64,
    sizes: Vec<Size>,
    runs: Vec<Run>,
    claims: Vec<Claim>,
}

/// What is trained here, and in the paper.
#[derive(Debug, Serialize)]
struct Size {
    workload: &'static str,
    parameters: usize,
    paper_parameters: &'static str,
    paper_data: &'static str,
}

#[derive(Debug, Serialize)]
struct Run {
    workload: &'static str,
    seed: u64,
    delta: f32,
    staleness: u64,
    /// The part of updates that was dropped.
    dropped: f64,
    /// By clock: the part of the traffic that is saved.
    saved: Vec<f64>,
    loss: f64,
    /// The loss without filter.
    plain_loss: f64,
    /// The loss before the first clock.
    initial_loss: f64,
}

impl Run {
    /// The part of the traffic of all clocks from this one on that is saved.
    fn saved_from(&self, clock: u64) -> f64 {
        let clocks = &self.saved[clock as usize..];
        clocks.iter().sum::<f64>() / clocks.len() as f64
    }

    /// The part that the paper speaks of: under BSP from some clock on, under SSP over the whole run.
    fn saved_as_counted(&self) -> f64 {
        let model = MODELS.iter().find(|model| model.workload == self.workload && self.staleness == 0);
        self.saved_from(model.map_or(0, |model| model.from_clock.min(self.saved.len() as u64 / 2)))
    }
}

pub(super) fn run(seeds: Seeds, clocks: u64, deltas: &[f32]) -> Result<PfTraffic> {
    let (mut runs, mut sizes) = (Vec::new(), Vec::new());
    for Model { workload, paper_parameters, paper_data, .. } in MODELS {
        let parameters = Flow::new(workload, seeds.start)?.elements();
        sizes.push(Size { workload, parameters, paper_parameters, paper_data });
        for seed in seeds.clone() {
            let initial_loss = Flow::new(workload, seed)?.loss();
            for staleness in STALENESS {
                let train = |codec: &str| Flow::new(workload, seed)?.train(codec, staleness, clocks);
                let plain_loss = train("auto")?.loss;
                for &delta in deltas {
                    let Traffic { bytes, dense_bytes, loss, dropped } = train(&chain(delta))?;
                    let saved = bytes.iter().map(|bytes| 1.0 - *bytes as f64 / dense_bytes as f64).collect();
                    runs.push(Run {
                        workload,
                        seed,
                        delta,
                        staleness,
                        dropped,
                        saved,
                        loss,
                        plain_loss,
                        initial_loss,
                    });
                }
            }
        }
    }
    let claims = claims(&runs, &sizes);
    Ok(PfTraffic { seeds, workers: flow::WORKERS, clocks, sizes, runs, claims })
}

/// The paper's format: places and values above 80% zeros, one array below, then snappy.
fn chain(delta: f32) -> String {
    format!("dvf:delta={delta}+hybrid+snappy")
}

pub(super) fn report(result: PfTraffic) -> Result<Report> {
    let sizes: Vec<String> = result
        .sizes
        .iter()
        .map(|size| {
            let Size { workload, parameters, paper_parameters, paper_data } = size;
            format!("{workload} with {parameters} parameters (paper: {paper_parameters}, {paper_data})")
        })
        .collect();
    Ok(Report {
        title: format!(
            "Parameter Flow, Figures 9 and 10, in small: {}; {} workers (paper: {PAPER_WORKERS}), {} clocks, made data, {}",
            sizes.join("; "),
            result.workers,
            result.clocks,
            named(&result.seeds)
        ),
        data: serde_json::to_value(&result)?,
        tables: vec![(
            "Traffic saved against dense pushes and broadcasts, by threshold (BSP: after clock 30 for mf); medians over seeds"
                .into(),
            table(&result),
        )],
        chart: chart(&result),
        claims: result.claims,
        notes: vec![
            "This is a loop of its own and not the system (docs/broadcast.md has figures of that). Workers push filtered \
             updates, servers broadcast the filtered sum (UCC); both keep what they drop. Threshold delta/sqrt(t), then the \
             paper's hybrid format and snappy."
                .into(),
            "A broadcast counts once for every worker. An entry of zero is no update. Under SSP fast workers go on after the \
             last clock that is counted, so that its broadcasts are as full as others."
                .into(),
        ],
    })
}

fn claims(runs: &[Run], sizes: &[Size]) -> Vec<Claim> {
    let mut claims = Vec::new();
    for (model, size) in MODELS.iter().zip(sizes) {
        for threshold in &model.thresholds {
            claims.extend([true, false].map(|bsp| claim_on_saving(runs, model, size, threshold, bsp)));
        }
    }
    for (sync, up, low, section) in
        [("BSP", "80%", "45%", "Figure 9, section 5.2.1"), ("SSP", "78%", "52%", "Figure 10, section 5.2.2")]
    {
        for (threshold, saved) in [("delta_up", up), ("delta_low", low)] {
            claims.push(Claim::open(
                format!("AlexNet, {sync}, {threshold}: up to {saved} of the traffic is saved."),
                format!("{saved} ({section})"),
                "not run",
                "AlexNet is not trained here",
            ));
        }
    }
    claims.extend(claims_on_dropping(runs));
    claims.push(claim_on_staleness(runs));
    claims.push(claim_on_loss(runs));
    claims
}

fn claim_on_saving(runs: &[Run], model: &Model, size: &Size, threshold: &Threshold, bsp: bool) -> Claim {
    let of = |run: &&Run| run.workload == model.workload && (run.staleness == 0) == bsp;
    let at = |run: &&Run| run.delta == threshold.delta;
    let with_delta: Vec<f64> = runs.iter().filter(of).filter(at).map(Run::saved_as_counted).collect();
    let with_any: Vec<f64> = runs.iter().filter(of).map(Run::saved_as_counted).collect();
    let least = with_any.iter().copied().fold(f64::INFINITY, f64::min);
    let most = with_any.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let [sync, section] =
        if bsp { ["BSP", "Figure 9, section 5.2.1"] } else { ["SSP", "Figure 10, section 5.2.2"] };
    let saved = threshold.saved[usize::from(!bsp)];
    let when = if bsp && model.from_clock > 0 { " after clock 30" } else { "" };
    Claim::open(
        format!(
            "{}, {sync}, {}: up to {:.0}% of the traffic is saved{when}.",
            model.workload,
            threshold.name,
            100.0 * saved
        ),
        format!("{:.0}% with delta = {:e} ({section})", 100.0 * saved, threshold.delta),
        format!(
            "{} with the paper's delta; {} to {} over all deltas run",
            spread(&with_delta, percent),
            percent(least),
            percent(most)
        ),
        format!(
            "the saving follows from delta in relation to the magnitude of updates, which is that of another model here: {} \
             parameters instead of {}, other data, batches and learning rate; the choice of delta would decide the claim",
            size.parameters, model.paper_parameters
        ),
    )
}

/// Section 5.1.3: how much the two thresholds drop.
fn claims_on_dropping(runs: &[Run]) -> [Claim; 2] {
    ["delta_up", "delta_low"].map(|name| {
        let dropped = |model: &Model| {
            let delta = model.thresholds.iter().find(|threshold| threshold.name == name).map(|it| it.delta);
            let of = |run: &&Run| run.workload == model.workload && Some(run.delta) == delta;
            let dropped: Vec<f64> = runs.iter().filter(of).map(|run| run.dropped).collect();
            format!("{} {}", model.workload, spread(&dropped, percent))
        };
        let paper = if name == "delta_up" { "60% to 80%" } else { "40% to 60%" };
        Claim::open(
            format!("{name} drops {paper} of updates on average per push or broadcast."),
            format!("{paper} (section 5.1.3)"),
            format!("with the paper's delta: {}", MODELS.each_ref().map(dropped).join(", ")),
            "the paper's thresholds were found from its own logs; ours would have to be chosen so that they drop as much",
        )
    })
}

/// Section 5.2.2: the more staleness, the less is saved. It needs no choice of a threshold: every one is a run.
fn claim_on_staleness(runs: &[Run]) -> Claim {
    let saved = |run: &Run, staleness: u64| {
        let same = |other: &&Run| {
            (other.workload, other.seed, other.delta, other.staleness)
                == (run.workload, run.seed, run.delta, staleness)
        };
        runs.iter().find(same).map_or(f64::NAN, Run::saved_as_counted)
    };
    let first = runs.iter().filter(|run| run.staleness == 0);
    let differences: Vec<f64> = first.map(|run| saved(run, 16) - saved(run, 4)).collect();
    Claim::swept(
        "lr, mf: the percentage of saved traffic decreases with staleness (ours: SSP-16 less SSP-4, over models, deltas and \
         seeds).",
        "decreases (section 5.2.2; no figures for lr and mf; AlexNet: 52% with SSP-4, 40% with SSP-16)",
        &differences,
        Bar::Below(0.0),
        |difference| format!("{:+.1} points", 100.0 * difference),
    )
}

fn claim_on_loss(runs: &[Run]) -> Claim {
    let worst = runs.iter().map(|run| run.loss / run.plain_loss).fold(0.0, f64::max);
    let progress = MODELS.map(|model| {
        let of = |figure: fn(&Run) -> f64| {
            let runs = runs.iter().filter(|run| run.workload == model.workload);
            median(&runs.map(figure).collect::<Vec<f64>>())
        };
        format!(
            "{} from {:.3} to {:.3}",
            model.workload,
            of(|run| run.initial_loss),
            of(|run| run.plain_loss)
        )
    });
    Claim::open(
        "The filter does not affect the objective value that is achieved.",
        "the same convergence criterion is reached (sections 5.2 and 5.4)",
        format!(
            "the loss is at most {worst:.3} of that without filter; without filter it fell for {}",
            progress.join(", ")
        ),
        "the models are not trained to a convergence criterion",
    )
}

fn table(result: &PfTraffic) -> Table {
    let mut table = Table::new([
        ("workload", Align::Left),
        ("model", Align::Left),
        ("delta", Align::Right),
        ("the paper's", Align::Left),
        ("dropped", Align::Right),
        ("saved", Align::Right),
        ("loss", Align::Right),
        ("without filter", Align::Right),
    ]);
    for first in result.runs.iter().filter(|run| run.seed == result.seeds.start) {
        let same = |run: &&Run| {
            (run.workload, run.delta, run.staleness) == (first.workload, first.delta, first.staleness)
        };
        let over = |figure: fn(&Run) -> f64| {
            median(&result.runs.iter().filter(same).map(figure).collect::<Vec<f64>>())
        };
        let thresholds = MODELS.iter().filter(|model| model.workload == first.workload);
        let known = thresholds.flat_map(|model| &model.thresholds).find(|known| known.delta == first.delta);
        table.row([
            first.workload.to_owned(),
            if first.staleness == 0 { "BSP".to_owned() } else { format!("SSP-{}", first.staleness) },
            format!("{:e}", first.delta),
            known.map_or("", |threshold| threshold.name).to_owned(),
            percent(over(|run| run.dropped)),
            percent(over(Run::saved_as_counted)),
            format!("{:.4}", over(|run| run.loss)),
            format!("{:.4}", over(|run| run.plain_loss)),
        ]);
    }
    table
}

fn chart(result: &PfTraffic) -> Chart {
    let line = |(workload, staleness): (&str, u64)| Line {
        name: format!(
            "{workload}, {}",
            if staleness == 0 { "BSP".into() } else { format!("SSP-{staleness}") }
        ),
        points: result
            .runs
            .iter()
            .filter(|run| run.seed == result.seeds.start)
            .filter(|run| (run.workload, run.staleness) == (workload, staleness))
            .map(|run| (f64::from(run.delta).log10(), 100.0 * run.saved_as_counted()))
            .collect(),
    };
    let lines = MODELS.iter().flat_map(|model| STALENESS.map(|staleness| line((model.workload, staleness))));
    Chart {
        title: "Traffic saved by DVF, by its threshold (Parameter Flow, Figures 9 and 10)".into(),
        x_label: "log10 of delta".into(),
        y_label: "% of the traffic without filter".into(),
        body: Body::Lines(lines.collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paramill_sim::reproduce::claim::Verdict;

    fn run_of(workload: &'static str, staleness: u64, saved: &[f64]) -> Run {
        Run {
            workload,
            seed: 1,
            delta: 1e-3,
            staleness,
            dropped: 0.7,
            saved: saved.to_vec(),
            loss: 1.0,
            plain_loss: 1.0,
            initial_loss: 2.0,
        }
    }

    #[test]
    fn whole_clocks_count_and_not_the_best_one() {
        let saved = [0.9, 0.1, 0.5, 0.7];
        assert_eq!(run_of("lr", 0, &saved).saved_as_counted(), 0.55, "lr: all clocks");
        assert_eq!(run_of("mf", 0, &saved).saved_as_counted(), 0.6, "mf, BSP: the later clocks");
        assert_eq!(run_of("mf", 4, &saved).saved_as_counted(), 0.55, "mf, SSP: all clocks");
        let mut long = vec![0.0; 30];
        long.resize(60, 0.8);
        assert!((run_of("mf", 0, &long).saved_as_counted() - 0.8).abs() < 1e-12, "after clock 30");
    }

    #[test]
    fn the_trend_of_staleness_holds_only_where_more_of_it_saves_less() {
        for (ssp16, expected) in [(0.49, true), (0.5, false), (0.51, false)] {
            let runs = [run_of("lr", 0, &[0.6]), run_of("lr", 4, &[0.5]), run_of("lr", 16, &[ssp16])];
            let claim = claim_on_staleness(&runs);
            assert_eq!(claim.verdict == Verdict::Holds, expected, "{claim:?}");
        }
    }

    #[test]
    fn the_paper_formats_updates_as_hybrid_and_snappy() {
        assert_eq!(chain(5e-4), "dvf:delta=0.0005+hybrid+snappy");
        for model in MODELS {
            assert!(model.thresholds.iter().all(|threshold| DELTAS.contains(&threshold.delta)));
        }
    }

    #[test]
    fn a_larger_threshold_saves_more_and_costs_nothing_when_it_is_zero_but_the_format() {
        let result = run(1..2, 6, &[1e-9, 1e-3, 1.0]).unwrap();
        for runs in result.runs.chunks(3) {
            let saved: Vec<f64> = runs.iter().map(Run::saved_as_counted).collect();
            assert!(saved[0] < saved[1] && saved[1] < saved[2] && saved[2] > 0.9, "{saved:?}");
            assert!(runs[0].dropped < 0.01 && runs[2].dropped > 0.9, "{runs:?}");
            assert!(runs.iter().all(|run| run.saved.len() == 6), "{runs:?}");
        }
    }
}
