//! The policy `local`: an iteration is `h` steps of computation, with one push and one answer of each table.

use paramill_core::policy::Axis;
use paramill_sim::report::{Report, run_scenario};
use paramill_sim::scenario::{Scenario, TableConfig};

const ELEMENTS: u64 = 100_000;

fn run(iterations: u64, local: &str) -> Report {
    let table = |name: &str| TableConfig { name: name.into(), shape: vec![ELEMENTS], rows: false, macs: 0 };
    let mut job =
        Scenario { iterations, tables: ["a", "b", "c", "d"].map(table).into(), ..Scenario::new(2, 1, 1) };
    job.compute.jitter = 0.0;
    // A table takes 32 ms on its link, and a step 10 ms.
    job.network.gbit_per_s = 0.1;
    let report = run_scenario(&job.with(Axis::Local, local)).expect("the scenario can be run");
    assert!(report.finished, "{local}: {:?}", report.stalled);
    report
}

fn waited(report: &Report) -> f64 {
    report.workers[0].waited_s
}

#[test]
fn bytes_fall_by_h_and_computation_stays() {
    let (every, local) = (run(100, "none"), run(2, "steps:h=50"));
    assert_eq!(every.bytes_pushed, 50 * local.bytes_pushed);
    assert_eq!(local.bytes_pushed, 2 * 2 * 4 * ELEMENTS * 4);
    for report in [&every, &local] {
        assert!((report.workers[0].computed_s - 1.0).abs() < 1e-6, "{:?}", report.workers[0]);
    }
    assert!(waited(&every) > 20.0 * waited(&local), "{} and {}", waited(&every), waited(&local));
}

/// Fragments have the same rounds as whole models; answers that are merged late are not waited for, but for those of the end.
#[test]
fn fragments_and_late_answers_change_times_and_nothing_else() {
    let whole = run(4, "steps:h=40");
    let fragments = run(4, "steps:h=40,fragments=4");
    let late = run(4, "steps:h=40,fragments=4,late=9");
    for other in [&fragments, &late] {
        assert_eq!((other.bytes_pushed, &other.tables), (whole.bytes_pushed, &whole.tables));
    }
    assert!(waited(&late) < 0.2 * waited(&fragments), "{} and {}", waited(&late), waited(&fragments));
}

#[test]
fn more_fragments_than_tables_are_refused() {
    let job =
        Scenario { iterations: 2, ..Scenario::new(2, 1, 100) }.with(Axis::Local, "steps:h=4,fragments=2");
    let report = run_scenario(&job).unwrap();
    let doing = &report.workers[0].doing;
    assert!(!report.finished && doing.contains("fragments = 2: expected at most 1"), "{doing}");
}
