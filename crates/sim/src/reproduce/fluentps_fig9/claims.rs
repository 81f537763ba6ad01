//! What FluentPS says of Figure 9 and Table IV, each at the paper's own figure.

use super::{PAIRS, Row, Run, TABLE_IV, find, pssp};
use crate::reproduce::claim::{Bar, Claim, median, percent, spread};

/// How far a number of delayed pulls may be from Table IV's, in parts of it. The two columns nearest to each other, 254.0 and
/// 336.8 under lazy execution, are 33% apart.
const DPR_TOLERANCE: f64 = 0.1;
/// How far a time may be from Table IV's. The two columns nearest to each other, 63.89 s and 64.62 s, are 1.1% apart.
const TIME_TOLERANCE: f64 = 0.005;
/// Staleness bounds of the SSP models of Figure 9.
const BOUNDS: [u64; 4] = [4, 5, 7, 12];

const NOT_RUN: &str = "not run";
const NOT_TRAINED: &str = "nothing is trained here";

/// Every claim, over all runs.
pub(super) fn claims(runs: &[Run]) -> Vec<Claim> {
    let mut claims = lazy_execution(runs);
    claims.extend(pairs(runs));
    claims.extend(orders(runs));
    claims.extend(TABLE_IV.iter().map(|cell| delays(runs, cell)));
    claims.extend(TABLE_IV.iter().map(|cell| time(runs, cell)));
    claims.extend(not_judged());
    claims
}

/// Section IV-B 3, and what follows from Table IV for SSP(3).
fn lazy_execution(runs: &[Run]) -> Vec<Claim> {
    let by_bound = |figure: fn(&Row, &Row) -> f64| {
        BOUNDS.map(|s| over(runs, |rows| figure(lazy(rows, s), soft(rows, s))))
    };
    let saved_by_bound = by_bound(saved);
    let faster_by_bound = by_bound(faster);
    let each = |figures: &[Vec<f64>; 4], show: fn(f64) -> String| {
        let each = BOUNDS.iter().zip(figures).map(|(s, figures)| format!("s={s} {}", show(median(figures))));
        format!("; by s: {}", each.collect::<Vec<_>>().join(", "))
    };
    let mut claims = vec![
        Claim::swept(
            "SSP(4), SSP(5), SSP(7), SSP(12): lazy execution saves up to 97.1% of the soft barrier's delayed pulls.",
            "97.1% (section IV-B 3, Figure 9)",
            &best(&saved_by_bound),
            Bar::AtLeast(0.971),
            saving,
        ),
        Claim::swept(
            "SSP(4), SSP(5), SSP(7), SSP(12): lazy execution is up to 1.24 times as fast as the soft barrier.",
            "1.24x (section IV-B 3, Figure 9)",
            &best(&faster_by_bound),
            Bar::AtLeast(1.24),
            times,
        ),
    ];
    claims[0].ours += &each(&saved_by_bound, saving);
    claims[1].ours += &each(&faster_by_bound, times);
    claims.push(Claim::swept(
        "SSP(3): lazy execution saves 91.6% of the soft barrier's delayed pulls.",
        "91.6%: 336.8 against 4002 (Table IV)",
        &over(runs, |rows| saved(lazy(rows, 3), soft(rows, 3))),
        Bar::AtLeast(1.0 - 336.8 / 4002.0),
        saving,
    ));
    claims.push(Claim::swept(
        "SSP(3): lazy execution is 1.25 times as fast as the soft barrier.",
        "1.25x: 64.62 s against 80.77 s (Table IV)",
        &over(runs, |rows| faster(lazy(rows, 3), soft(rows, 3))),
        Bar::AtLeast(80.77 / 64.62),
        times,
    ));
    claims
}

/// Section IV-B 4: PSSP beside the SSP of equal regret bound.
fn pairs(runs: &[Run]) -> Vec<Claim> {
    let saved_lazily = PAIRS.map(|(s, c)| over(runs, |rows| saved(find(rows, &pssp(c)), lazy(rows, s))));
    let each = PAIRS.iter().zip(&saved_lazily).map(|((s, c), figures)| {
        format!("PSSP(3, 1/{:.0}) and SSP({s}) {}", 1.0 / c, saving(median(figures)))
    });
    let each = each.collect::<Vec<_>>().join(", ");
    let saved_softly = |(s, c): (u64, f64)| over(runs, |rows| saved(softly(rows, c), soft(rows, s)));
    let mut claims = vec![
        Claim::swept(
            "Soft barrier: PSSP(3, 1/10), model G, saves 97.1% of the delayed pulls of SSP(12), model H.",
            "97.1% (section IV-B 4, Figure 9)",
            &saved_softly(PAIRS[3]),
            Bar::AtLeast(0.971),
            saving,
        ),
        Claim::swept(
            "Soft barrier: PSSP(3, 1/10), model G, takes 28.5% less time than SSP(12), model H.",
            "28.5% (section IV-B 4, Figure 9)",
            &over(runs, |rows| 1.0 - softly(rows, 0.1).seconds / soft(rows, 12).seconds),
            Bar::AtLeast(0.285),
            percent,
        ),
        Claim::swept(
            "Lazy execution: PSSP saves 70.7% of the delayed pulls of the SSP with the same regret bound (the text names \
             no pair: the best of the four in each run).",
            "70.7% (section IV-B 4, Figure 9)",
            &best(&saved_lazily),
            Bar::AtLeast(0.707),
            saving,
        ),
    ];
    claims[2].ours += &format!("; by pair: {each}");
    claims.extend(PAIRS[..3].iter().map(|&(s, c)| {
        Claim::open(
            format!("Soft barrier: PSSP(3, 1/{:.0}) saves delayed pulls of SSP({s}).", 1.0 / c),
            "two bars (Figure 9)",
            spread(&saved_softly((s, c)), saving),
            "the text has no figure for this pair",
        )
    }));
    claims.push(Claim::swept(
        "Soft barrier: PSSP(3, 1/2) is 1.38 times as fast as SSP(3).",
        "1.38x (section IV-B 4, Figure 10): 58.71 s against 80.77 s (Table IV)",
        &over(runs, |rows| faster(softly(rows, 0.5), soft(rows, 3))),
        Bar::AtLeast(80.77 / 58.71),
        times,
    ));
    claims
}

/// Claims on an order, without a figure.
fn orders(runs: &[Run]) -> Vec<Claim> {
    let seconds_of_others = |rows: &[Row]| {
        let others = rows.iter().filter(|row| row.paper_seconds.is_some() && row.sync != "asp");
        others.map(|row| row.seconds).fold(f64::INFINITY, f64::min)
    };
    let soft_to_lazy = |rows: &[Row], c: f64| softly(rows, c).seconds / find(rows, &pssp(c)).seconds;
    vec![
        Claim::swept(
            "ASP is the fastest of Table IV's models (ours: its time in parts of the next one's).",
            "fastest (section IV-B 4, Figure 10): 45.85 s, the next 52.95 s (Table IV)",
            &over(runs, |rows| find(rows, "asp").seconds / seconds_of_others(rows)),
            Bar::Below(1.0),
            parts,
        ),
        Claim::swept(
            "PSSP with a soft barrier sometimes takes less time than with lazy execution (ours: the least part of it, of \
             three c).",
            "less (section IV-B 4): 52.95 s against 58.85 s with c = 0.1 (Table IV)",
            &over(runs, |rows| {
                [0.1, 0.3, 0.5].map(|c| soft_to_lazy(rows, c)).into_iter().fold(f64::INFINITY, f64::min)
            }),
            Bar::Below(1.0),
            parts,
        ),
        Claim::swept(
            "SSP(3): a fast worker reads updated parameters under lazy execution (ours: mean staleness in parts of the soft \
             barrier's).",
            "less stale (section IV-B 3; no figure)",
            &over(runs, |rows| lazy(rows, 3).mean_staleness / soft(rows, 3).mean_staleness),
            Bar::Below(1.0),
            parts,
        ),
    ]
}

/// A cell of the row of delayed pulls.
fn delays(runs: &[Run], (sync, _, dprs): &(&str, f64, f64)) -> Claim {
    let digits = if *dprs < 100.0 { 2 } else { 1 };
    Claim::swept(
        format!("{sync}: delayed pulls per 100 iterations."),
        format!("{dprs} (Table IV, AlexNet on CIFAR-10), within {}", percent(DPR_TOLERANCE)),
        &over(runs, |rows| find(rows, sync).dprs),
        Bar::Within { figure: *dprs, tolerance: DPR_TOLERANCE * dprs },
        |figure| format!("{figure:.digits$}"),
    )
}

/// A cell of the row of times, in parts of ASP's time, which is an input.
fn time(runs: &[Run], (sync, seconds, _): &(&str, f64, f64)) -> Claim {
    let (_, asp, _) = TABLE_IV[0];
    if *sync == "asp" {
        return Claim::open(
            "asp: seconds per 100 iterations.",
            format!("{asp} s (Table IV, AlexNet on CIFAR-10)"),
            spread(&over(runs, |rows| find(rows, "asp").seconds), |figure| format!("{figure:.2} s")),
            "an input: the time of a computation comes from it",
        );
    }
    let figure = seconds / asp;
    Claim::swept(
        format!("{sync}: the time, in parts of ASP's."),
        format!(
            "{figure:.3}: {seconds} s (Table IV, AlexNet on CIFAR-10), within {}",
            percent(TIME_TOLERANCE)
        ),
        &over(runs, |rows| find(rows, sync).seconds / find(rows, "asp").seconds),
        Bar::Within { figure, tolerance: TIME_TOLERANCE * figure },
        parts,
    )
}

fn not_judged() -> Vec<Claim> {
    let one_server = "only the setting of 64 workers and one server is run, and it knows no data set";
    vec![
        Claim::open(
            "AlexNet on CIFAR-10: test accuracies of the eleven columns.",
            "0.756 to 0.765 (Table IV)",
            NOT_RUN,
            NOT_TRAINED,
        ),
        Claim::open(
            "ASP's test accuracy is the lowest, about 1% below that of PSSP(3, 1/2), and SSP's is close to PSSP's.",
            "about 1% (section IV-B 4, Figure 10)",
            NOT_RUN,
            NOT_TRAINED,
        ),
        Claim::open(
            "Lazy execution converges more robustly than the soft barrier.",
            "more robustly (section IV-B 3)",
            NOT_RUN,
            NOT_TRAINED,
        ),
        Claim::open(
            "AlexNet on CIFAR-100: times, test accuracies and delayed pulls of the eleven columns.",
            "48.84 to 78.68 s, 0.426 to 0.438, 0 to 3834 (Table IV)",
            NOT_RUN,
            one_server,
        ),
        Claim::open(
            "ResNet-56 on CIFAR-10: times, test accuracies and delayed pulls of the eleven columns.",
            "37.94 to 46.76 s, 0.924 to 0.932, 0 to 15160 (Table IV)",
            NOT_RUN,
            one_server,
        ),
        Claim::open(
            "ResNet-56 on CIFAR-100: times, test accuracies and delayed pulls of the eleven columns.",
            "37.07 to 48.79 s, 0.685 to 0.692, 0 to 21289 (Table IV)",
            NOT_RUN,
            one_server,
        ),
        Claim::open(
            "Lazy execution and PSSP cooperate better for ResNet-56 than for AlexNet.",
            "better (section IV-B 4, Table IV)",
            NOT_RUN,
            one_server,
        ),
    ]
}

/// A figure of every run.
fn over(runs: &[Run], figure: impl Fn(&[Row]) -> f64) -> Vec<f64> {
    runs.iter().map(|run| figure(&run.rows)).collect()
}

/// The largest figure of each run: what "up to" means.
fn best(figures: &[Vec<f64>; 4]) -> Vec<f64> {
    let runs = 0..figures[0].len();
    runs.map(|run| figures.iter().map(|of| of[run]).fold(f64::NEG_INFINITY, f64::max)).collect()
}

fn lazy(rows: &[Row], s: u64) -> &Row {
    find(rows, &format!("ssp:s={s}"))
}

fn soft(rows: &[Row], s: u64) -> &Row {
    find(rows, &format!("ssp:s={s},exec=soft"))
}

/// PSSP(3, c) with a soft barrier.
fn softly(rows: &[Row], c: f64) -> &Row {
    find(rows, &format!("{},exec=soft", pssp(c)))
}

/// The part of delayed pulls that is saved; nothing, where there were none to save and none are made.
fn saved(this: &Row, of: &Row) -> f64 {
    if this.dprs == of.dprs { 0.0 } else { 1.0 - this.dprs / of.dprs }
}

fn saving(part: f64) -> String {
    if part.is_finite() { percent(part) } else { "delays where there were none".to_owned() }
}

fn faster(this: &Row, than: &Row) -> f64 {
    than.seconds / this.seconds
}

fn times(ratio: f64) -> String {
    format!("{ratio:.2}x")
}

fn parts(ratio: f64) -> String {
    format!("{ratio:.3}")
}

#[cfg(test)]
mod tests {
    use super::super::{Setting, models};
    use super::*;
    use crate::reproduce::claim::Verdict;

    /// A run with the figures that Table IV and the text of Figure 9 have.
    fn as_published() -> Run {
        let row = |sync: String| {
            let cell = TABLE_IV.iter().find(|(known, ..)| *known == sync);
            let (seconds, dprs) = match (sync.as_str(), cell) {
                (_, Some((_, seconds, dprs))) => (*seconds, *dprs),
                ("ssp:s=12,exec=soft", _) => (52.95 / 0.7149, 23.65 / 0.0289),
                ("ssp:s=12", _) => (52.95 / 0.7149 / 1.2401, 23.65),
                ("ssp:s=4", _) => (60.0, 254.0 / 0.2929),
                (soft, _) if soft.ends_with("soft") => (60.0, 1000.0),
                _ => (60.0, 200.0),
            };
            let staleness = if sync.ends_with("soft") { 3.0 } else { 1.0 };
            Row {
                sync,
                dprs,
                seconds,
                mean_staleness: staleness,
                link_load: 0.5,
                paper_dprs: cell.map(|cell| cell.2),
                paper_seconds: cell.map(|cell| cell.1),
            }
        };
        let setting = Setting { load: 0.5, jitter: 0.05, straggle_p: 0.0, straggle_factor: 1.0 };
        Run { setting, seed: 1, rows: models().into_iter().map(row).collect() }
    }

    fn failing(run: &Run) -> Vec<String> {
        let fails = |claim: &Claim| matches!(claim.verdict, Verdict::Fails(_));
        claims(std::slice::from_ref(run)).into_iter().filter(fails).map(|claim| claim.claim).collect()
    }

    #[test]
    fn the_papers_own_figures_hold() {
        assert_eq!(failing(&as_published()), Vec::<String>::new());
    }

    #[test]
    fn a_figure_just_short_of_the_papers_does_not_hold() {
        // One row is made a little worse; the beginning of a claim that must then fail.
        let cases = [
            ("ssp:s=12", 1.005, 1.0, "SSP(4), SSP(5), SSP(7), SSP(12): lazy execution is up to 1.24"),
            ("ssp:s=12", 1.0, 1.05, "SSP(4), SSP(5), SSP(7), SSP(12): lazy execution saves up to 97.1%"),
            ("ssp:s=12,exec=soft", 1.0, 0.99, "Soft barrier: PSSP(3, 1/10), model G, saves 97.1%"),
            ("ssp:s=12,exec=soft", 0.99, 1.0, "Soft barrier: PSSP(3, 1/10), model G, takes 28.5%"),
            ("ssp:s=4", 1.0, 0.99, "Lazy execution: PSSP saves 70.7%"),
            ("ssp:s=3", 1.0, 1.01, "SSP(3): lazy execution saves 91.6%"),
            ("ssp:s=3", 1.01, 1.0, "SSP(3): lazy execution is 1.25"),
            ("ssp:s=3", 1.006, 1.0, "ssp:s=3: the time"),
            ("pssp:s=3,c=0.5", 1.0, 1.11, "pssp:s=3,c=0.5: delayed pulls"),
            ("pssp:s=3,c=0.5,exec=soft", 1.001, 1.0, "Soft barrier: PSSP(3, 1/2) is 1.38"),
            ("asp", 1.2, 1.0, "ASP is the fastest"),
        ];
        for (sync, seconds, dprs, expected) in cases {
            let mut run = as_published();
            let row = run.rows.iter_mut().find(|row| row.sync == sync).unwrap();
            row.seconds *= seconds;
            row.dprs *= dprs;
            let failing = failing(&run);
            assert!(failing.iter().any(|claim| claim.starts_with(expected)), "{expected}: {failing:#?}");
        }
    }

    #[test]
    fn nothing_is_saved_where_nothing_was_delayed() {
        let row = |dprs: f64| Row { dprs, ..as_published().rows[0].clone() };
        assert_eq!(saved(&row(0.0), &row(0.0)), 0.0);
        assert!(!Bar::AtLeast(0.0).is_met_by(saved(&row(1.0), &row(0.0))), "new delays are no saving");
        assert_eq!(saved(&row(1.0), &row(4.0)), 0.75);
    }
}
