//! A paper's claim, the paper's own figure beside ours, and whether it holds.
//!
//! Every claim is judged at the figure that the paper gives. Where "about the same" needs a tolerance, the tolerance is
//! smaller than the difference that the claim is about, and the claim's text states it. A claim that an experiment cannot
//! judge is left open, with the reason.

use serde::Serialize;

/// One claim of a paper.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Claim {
    /// The claim, as a sentence.
    pub claim: String,
    /// The paper's own figure, and where the paper has it.
    pub paper: String,
    /// Our figure.
    pub ours: String,
    /// `holds`, and `why` where a reason is given.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// Whether a claim holds at the paper's figure.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(into = "Fields")]
pub enum Verdict {
    /// Our figure meets the paper's.
    Holds,
    /// Our figure does not meet the paper's; the reason, where it is known.
    Fails(Option<String>),
    /// The experiment cannot judge the claim; the reason.
    Open(String),
}

/// The two fields of a verdict in JSON.
#[derive(Serialize)]
struct Fields {
    holds: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

impl From<Verdict> for Fields {
    fn from(verdict: Verdict) -> Fields {
        match verdict {
            Verdict::Holds => Fields { holds: Some(true), why: None },
            Verdict::Fails(why) => Fields { holds: Some(false), why },
            Verdict::Open(why) => Fields { holds: None, why: Some(why) },
        }
    }
}

/// How our figure must stand to the paper's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bar {
    /// As large or larger: a saving, a speed-up.
    AtLeast(f64),
    /// As small or smaller: a time.
    AtMost(f64),
    /// Smaller, for claims on an order.
    Below(f64),
    /// About the same.
    Within {
        /// The paper's figure.
        figure: f64,
        /// How far ours may be from it; less than half of the difference between two figures that must be told apart.
        tolerance: f64,
    },
}

impl Bar {
    /// Whether a figure of ours meets it. A figure that is not a number meets nothing.
    pub fn is_met_by(self, ours: f64) -> bool {
        match self {
            Bar::AtLeast(figure) => ours >= figure,
            Bar::AtMost(figure) => ours <= figure,
            Bar::Below(figure) => ours < figure,
            Bar::Within { figure, tolerance } => (ours - figure).abs() <= tolerance,
        }
    }
}

impl Claim {
    /// A claim that was judged.
    pub fn judged(
        claim: impl Into<String>,
        paper: impl Into<String>,
        ours: impl Into<String>,
        holds: bool,
    ) -> Claim {
        let verdict = if holds { Verdict::Holds } else { Verdict::Fails(None) };
        Claim { claim: claim.into(), paper: paper.into(), ours: ours.into(), verdict }
    }

    /// A claim that this experiment cannot judge, and why.
    pub fn open(
        claim: impl Into<String>,
        paper: impl Into<String>,
        ours: impl Into<String>,
        why: impl Into<String>,
    ) -> Claim {
        let verdict = Verdict::Open(why.into());
        Claim { claim: claim.into(), paper: paper.into(), ours: ours.into(), verdict }
    }

    /// A claim judged over runs that differ in what the paper leaves open, or in their seed: it holds if more than half of
    /// the runs meet the bar. A corner of the sweep that meets it is not enough.
    pub fn swept(
        claim: impl Into<String>,
        paper: impl Into<String>,
        figures: &[f64],
        bar: Bar,
        show: impl Fn(f64) -> String,
    ) -> Claim {
        let met = figures.iter().filter(|figure| bar.is_met_by(**figure)).count();
        let ours = format!("{}; met in {met} of {}", spread(figures, show), figures.len());
        Claim::judged(claim, paper, ours, 2 * met > figures.len())
    }

    /// Takes back that the claim holds, unless something else is met too.
    pub fn only_if(mut self, met: bool) -> Claim {
        if !met && self.verdict == Verdict::Holds {
            self.verdict = Verdict::Fails(None);
        }
        self
    }

    /// Adds the reason, if the claim does not hold.
    pub fn because(mut self, why: impl Into<String>) -> Claim {
        if let Verdict::Fails(reason) = &mut self.verdict {
            *reason = Some(why.into());
        }
        self
    }
}

/// The median of figures and their range, as a sentence.
pub fn spread(figures: &[f64], show: impl Fn(f64) -> String) -> String {
    let sorted = sorted(figures);
    match (sorted.first(), sorted.last()) {
        (Some(&least), Some(&most)) if figures.len() > 1 => {
            format!("median {} ({} to {})", show(median(figures)), show(least), show(most))
        }
        (Some(&only), _) => show(only),
        _ => "none".to_owned(),
    }
}

/// The middle of figures, the lower one of two; NaN of none.
pub fn median(figures: &[f64]) -> f64 {
    sorted(figures).get(figures.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

/// The part that is saved, as people write it.
pub fn percent(part: f64) -> String {
    format!("{:.1}%", 100.0 * part)
}

fn sorted(figures: &[f64]) -> Vec<f64> {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_met_at_the_papers_figure_and_not_below_it() {
        assert!(Bar::AtLeast(0.971).is_met_by(0.971) && !Bar::AtLeast(0.971).is_met_by(0.9709));
        assert!(Bar::AtMost(0.62).is_met_by(0.62) && !Bar::AtMost(0.62).is_met_by(0.621));
        assert!(Bar::Below(1.0).is_met_by(0.999) && !Bar::Below(1.0).is_met_by(1.0));
        let within = Bar::Within { figure: 0.825, tolerance: 0.008 };
        assert!(within.is_met_by(0.8329) && within.is_met_by(0.8171));
        assert!(!within.is_met_by(0.8331) && !within.is_met_by(0.8169));
        let bars = [Bar::AtLeast(0.0), Bar::AtMost(0.0), Bar::Below(0.0), within];
        assert!(bars.iter().all(|bar| !bar.is_met_by(f64::NAN)));
    }

    #[test]
    fn a_sweep_holds_when_more_than_half_of_its_runs_meet_the_bar() {
        let swept = |figures: &[f64]| Claim::swept("c", "p", figures, Bar::AtLeast(2.0), |x| format!("{x}x"));
        assert_eq!(swept(&[1.0, 2.0, 3.0]).verdict, Verdict::Holds);
        assert_eq!(swept(&[1.0, 2.0, 3.0]).ours, "median 2x (1x to 3x); met in 2 of 3");
        assert_eq!(swept(&[1.0, 2.0]).verdict, Verdict::Fails(None), "half is not more than half");
        assert_eq!(swept(&[1.0, 1.0, 9.0]).verdict, Verdict::Fails(None), "a corner is not enough");
        assert_eq!(swept(&[2.0]).only_if(true).verdict, Verdict::Holds);
        assert_eq!(swept(&[2.0]).only_if(false).verdict, Verdict::Fails(None));
        assert_eq!(swept(&[]).verdict, Verdict::Fails(None));
        assert_eq!(swept(&[2.0]).ours, "2x; met in 1 of 1");
    }

    #[test]
    fn an_open_claim_is_null_with_its_reason_and_a_failed_one_may_have_one() {
        let json = |claim: &Claim| serde_json::to_value(claim).unwrap();
        let open = json(&Claim::open("c", "p", "o", "not run"));
        assert_eq!(
            open,
            serde_json::json!({"claim": "c", "paper": "p", "ours": "o", "holds": null, "why": "not run"})
        );
        let fails = Claim::judged("c", "p", "o", false);
        assert_eq!(json(&fails)["holds"], false);
        assert!(json(&fails).get("why").is_none());
        assert_eq!(json(&fails.because("too small"))["why"], "too small");
        let holds = Claim::judged("c", "p", "o", true).because("never shown");
        assert_eq!(json(&holds)["holds"], true);
        assert!(json(&holds).get("why").is_none());
    }
}
