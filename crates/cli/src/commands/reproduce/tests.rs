//! Every experiment, in small: its report has the shape that programs rely on, and no claim of its paper is missing.

use super::*;
use paramill_sim::reproduce as simulated;
use std::collections::BTreeSet;

/// The report of every experiment, at a size that takes no time.
fn reports() -> Vec<(&'static str, Report)> {
    let settings = simulated::fluentps_fig9::settings();
    let fig9 = simulated::fluentps_fig9::run_with(1..2, 8, &[settings[0], settings[35]]);
    let table1 = simulated::psp_table1::run_with(1..2, 2);
    vec![
        ("mps-placement", mps_placement::report(simulated::mps_placement::run())),
        ("fluentps-fig9", fluentps_fig9::report(fig9.unwrap())),
        ("psp-table1", psp_table1::report(table1.unwrap())),
        ("pf-snappy", pf_snappy::report(pf_snappy::run(1, 10_000).unwrap())),
        ("pf-traffic", pf_traffic::report(pf_traffic::run(1..2, 4, &[2e-4, 1e-3]).unwrap())),
    ]
    .into_iter()
    .map(|(name, report)| (name, report.unwrap()))
    .collect()
}

/// The claims of every paper with its figures, as they were last compared with the paper's text.
const GOLDEN: [(&str, &str); 5] = [
    ("mps-placement", include_str!("golden/mps-placement.txt")),
    ("fluentps-fig9", include_str!("golden/fluentps-fig9.txt")),
    ("psp-table1", include_str!("golden/psp-table1.txt")),
    ("pf-snappy", include_str!("golden/pf-snappy.txt")),
    ("pf-traffic", include_str!("golden/pf-traffic.txt")),
];

#[test]
fn every_claim_has_its_fields_and_a_reason_where_it_is_not_judged() {
    let reports = reports();
    let names: Vec<&str> = reports.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, EXPERIMENTS.iter().map(|experiment| experiment.name).collect::<Vec<_>>());
    for (name, report) in reports {
        let claims = report.data["claims"].as_array().unwrap();
        assert_eq!(claims.len(), report.claims.len(), "{name}: text and JSON show the same claims");
        for claim in claims {
            let keys: BTreeSet<&str> = claim.as_object().unwrap().keys().map(String::as_str).collect();
            let known = BTreeSet::from(["claim", "paper", "ours", "holds", "why"]);
            assert!(keys.is_subset(&known) && keys.len() >= 4, "{name}: {claim}");
            for field in ["claim", "paper", "ours"] {
                assert!(!claim[field].as_str().unwrap().is_empty(), "{name}: {claim}");
            }
            assert!(
                claim["claim"].as_str().unwrap().ends_with('.'),
                "{name}: a claim is a sentence: {claim}"
            );
            match claim["holds"].as_bool() {
                Some(true) => assert!(claim.get("why").is_none(), "{name}: {claim}"),
                Some(false) => assert!(claim.get("why").is_none_or(|why| why.is_string()), "{name}: {claim}"),
                None => {
                    assert!(claim["holds"].is_null() && claim.get("holds").is_some(), "{name}: {claim}");
                    assert!(!claim["why"].as_str().unwrap().is_empty(), "{name}: {claim}");
                }
            }
        }
    }
}

#[test]
fn no_claim_of_a_paper_is_missing_and_each_has_the_papers_figure() {
    for ((name, report), (golden_name, golden)) in reports().into_iter().zip(GOLDEN) {
        assert_eq!(name, golden_name);
        let mut listed = String::new();
        for claim in &report.claims {
            listed += &format!("{}\n    {}\n", claim.claim, claim.paper);
        }
        assert_eq!(listed, golden, "{name}: claims and the paper's figures");
    }
}

#[test]
fn the_table_shows_every_claim_and_every_reason_once() {
    let claims = [
        Claim::judged("A is faster.", "2x", "2.1x", true),
        Claim::judged("B is smaller.", "3x", "1.0x", false).because("B is random"),
        Claim::open("C is exact.", "0.1", "not run", "nothing is trained"),
        Claim::judged("D is new.", "1", "0", false),
        Claim::open("E is exact.", "0.2", "not run", "nothing is trained"),
    ];
    let expected = "\
#  claim          paper  ours     holds
1  A is faster.   2x     2.1x     yes
2  B is smaller.  3x     1.0x     NO
3  C is exact.    0.1    not run  not judged
4  D is new.      1      0        NO
5  E is exact.    0.2    not run  not judged
";
    assert_eq!(claims_table(&claims).plain(), expected);
    assert_eq!(summary(&claims), "5 claims: 1 hold, 2 do not, 2 cannot be judged here");
    let expected = ["2: does not hold: B is random", "3, 5: not judged: nothing is trained"];
    assert_eq!(reasons(&claims), expected);
}

#[test]
fn a_seed_without_effect_is_refused() {
    let args = |seed, seeds| ReproduceArgs { name: None, list: false, plot: None, seed, seeds };
    let refused = |name: &str, seed, seeds| {
        super::seeds(find(name).unwrap(), &args(seed, seeds)).unwrap_err().to_string()
    };
    assert!(refused("mps-placement", Some(1), None).contains("nothing is random in mps-placement; leave"));
    assert!(refused("mps-placement", None, Some(2)).contains("nothing is random in mps-placement; leave"));
    assert!(refused("pf-snappy", None, Some(2)).contains("one seed; leave --seeds out"));
    assert!(refused("psp-table1", Some(u64::MAX), Some(1)).contains("is too large"));
    let taken = |name: &str, seed, seeds| super::seeds(find(name).unwrap(), &args(seed, seeds)).unwrap();
    assert_eq!(taken("mps-placement", None, None), 1..2);
    assert_eq!(taken("pf-snappy", Some(7), None), 7..8);
    assert_eq!(taken("fluentps-fig9", Some(7), Some(3)), 7..10);
}
