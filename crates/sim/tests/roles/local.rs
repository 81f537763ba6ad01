//! Jobs with local steps: who may take part.

use super::bench::Bench;
use super::{W, job};
use paramill_core::policy::Axis;
use paramill_core::table::TableSpec;
use paramill_core::worker::{Gradient, WorkerError};

fn begun(follows: bool) -> (Bench, Option<Result<(), WorkerError>>) {
    let mut config = job(1, 1, "bsp", "sgd:lr=1");
    config.policy = config.policy.with(Axis::Local, "steps:h=4,fragments=2");
    let mut bench = Bench::new(config, 1);
    let now = bench.now();
    let worker = bench.worker_mut(0);
    if follows {
        worker.step_locally();
    }
    worker.declare(TableSpec::dense("w", [8]), vec![1.0; 8]).expect("nothing is declared yet");
    let ticket = worker.start(now).expect("there is a table");
    bench.pass(1.0);
    let outcome = bench.outcome(0, ticket);
    (bench, outcome)
}

#[test]
fn a_worker_that_does_not_follow_the_policy_is_told() {
    let (_, outcome) = begun(false);
    let why = outcome.expect("it does not wait").unwrap_err().to_string();
    assert!(
        why.starts_with("the job has local=steps:h=4,fragments=2, and this program synchronises"),
        "{why}"
    );
}

#[test]
fn an_answer_comes_before_the_clock_turns() {
    let (mut bench, outcome) = begun(true);
    assert_eq!(outcome, Some(Ok(())));
    let now = bench.now();
    let ticket = bench.worker_mut(0).push(now, W, Gradient::Dense(&[1.0; 8]), true).expect("it fits");
    bench.run();
    assert_eq!(bench.outcome(0, ticket), Some(Ok(())));
    assert_eq!((bench.worker(0).values(W)[0], bench.worker(0).current_clock()), (0.0, 0));
}
