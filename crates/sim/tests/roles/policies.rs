//! Policies that would have no effect, or that cannot work together: they are refused with cause and remedy.

use super::bench::Bench;
use super::{W, job};
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::registry::Registry;
use paramill_core::table::TableSpec;
use paramill_core::types::ServerId;
use paramill_core::worker::WorkerError;

fn under(sync: &str, codec: &str, answer_codec: &str) -> JobConfig {
    let config = job(2, 2, sync, "sgd:lr=1");
    let policy = config.policy.clone().with(Axis::Codec, codec).with(Axis::AnswerCodec, answer_codec);
    JobConfig { policy, ..config }
}

fn tables() -> [TableSpec; 2] {
    [TableSpec::dense("dense", [40]), TableSpec::sparse("rows", 10, 4)]
}

/// What is said of a job that is valid by itself, once its tables are known.
fn outcome(config: &JobConfig, tables: &[TableSpec]) -> Result<(), String> {
    let registry = Registry::builtin();
    config.check(&registry).expect("it is valid by itself");
    config.check_tables(&registry, tables).map_err(|error| error.to_string())
}

#[test]
fn codecs_that_do_nothing_for_rows_are_refused_wherever_they_come_from() {
    for (codec, answers, expected) in [
        ("none", "dvf:delta=1", "table `rows`: answers by `dvf:delta=1` are differences"),
        ("none", "topk:0.1+f16", "give it answer_codec=none, or a quantiser such as f16"),
        ("significance:0.01", "none", "table `rows`: `significance:0.01` compares a gradient"),
    ] {
        let config = under("bsp", codec, answers);
        let error = outcome(&config, &tables()).unwrap_err();
        assert!(error.contains(expected), "{error}");
        assert_eq!(outcome(&config, &tables()[..1]), Ok(()), "a dense table has it");

        // The same from an exception, and from the table itself.
        let own = Policies::of([(Axis::Codec, codec), (Axis::AnswerCodec, answers)]);
        let plain = under("bsp", "none", "none");
        let overrides = vec![PolicyOverride::new("r*", own.clone())];
        let error = outcome(&JobConfig { overrides, ..plain.clone() }, &tables()).unwrap_err();
        assert!(error.contains(expected), "{error}");
        let [dense, rows] = tables();
        let error = outcome(&plain, &[dense, TableSpec { policy: own, ..rows }]).unwrap_err();
        assert!(error.contains(expected), "{error}");

        // The remedy helps.
        let none =
            PolicyOverride::new("rows", Policies::of([(Axis::Codec, "none"), (Axis::AnswerCodec, "none")]));
        assert_eq!(outcome(&JobConfig { overrides: vec![none], ..config }, &tables()), Ok(()));
    }
    assert_eq!(outcome(&under("bsp", "topk:0.1", "f16"), &tables()), Ok(()), "these work for rows");
}

#[test]
fn an_exception_that_no_table_matches_is_refused_with_the_tables_there_are() {
    let overrides = vec![PolicyOverride::new("nomatch*", Policies::of([(Axis::Sync, "asp")]))];
    let config = JobConfig { overrides, ..under("bsp", "none", "none") };
    let error = outcome(&config, &tables()).unwrap_err();
    assert!(error.contains("table `nomatch*`: no table matches; the job has dense, rows"), "{error}");

    let server = PolicyOverride::new("*", Policies::of([(Axis::Sync, "asp")])).on(ServerId(2));
    let config = JobConfig { overrides: vec![server], ..under("bsp", "none", "none") };
    let error = config.check(&Registry::builtin()).unwrap_err().to_string();
    assert!(error.contains("an exception for server 2: the job has servers 0 to 1"), "{error}");
}

#[test]
fn differences_are_refused_under_partial_pulling_whoever_says_which() {
    let differences = PolicyOverride::new("dense", Policies::of([(Axis::AnswerCodec, "topk:0.1")]));
    let psp = PolicyOverride::new("dense", Policies::of([(Axis::Sync, "psp:c=1,b=0.5")]));
    let dense = &tables()[..1];
    for (sync, overrides) in [
        ("psp:c=1,b=0.5", vec![differences.clone()]),
        ("bsp", vec![differences.clone(), psp.clone()]),
        ("bsp", vec![psp, differences]),
    ] {
        let error = outcome(&JobConfig { overrides, ..under(sync, "none", "none") }, dense).unwrap_err();
        assert!(error.contains("table `dense`: topk:0.1: `psp:c=1,b=0.5` drops late answers"), "{error}");
    }
    // With b = 1 a worker drops no answer.
    for b in ["", ",b=1", ",b=100%"] {
        let config = under(&format!("psp:c=1{b}"), "none", "topk:0.1");
        assert_eq!(config.check(&Registry::builtin()).map_err(|error| error.to_string()), Ok(()), "{b}");
        assert_eq!(outcome(&config, dense), Ok(()), "{b}");
    }
}

#[test]
fn a_sum_is_not_scaled_by_its_gradients_twice() {
    let mut config = under("psp:c=1", "none", "none");
    config.policy.set(Axis::Reduce, "sum").unwrap();
    let error = outcome(&config, &tables()).unwrap_err();
    assert!(error.contains("table `dense`: under `psp:c=1`") && error.contains("use reduce=mean"), "{error}");
    config.policy.set(Axis::Sync, "bsp").unwrap();
    assert_eq!(outcome(&config, &tables()), Ok(()));
}

/// Each server's model holds for its own blocks. What they mean together is in `psp`.
#[test]
fn partial_pulling_may_differ_between_servers() {
    let on_one =
        |sync: &str| PolicyOverride::new("dense", Policies::of([(Axis::Sync, sync)])).on(ServerId(1));
    for (job, one) in
        [("bsp", "psp:c=1,b=0.5"), ("psp:c=1,b=0.5", "psp:c=1,b=0.9,tau2=1"), ("psp:c=1,b=0.5", "asp")]
    {
        let config = JobConfig { overrides: vec![on_one(one)], ..under(job, "none", "none") };
        assert_eq!(outcome(&config, &tables()[..1]), Ok(()), "{job}, {one}");
    }
    // A server that drops late answers cannot send differences, whatever the others do.
    let config = JobConfig { overrides: vec![on_one("psp:c=1,b=0.5")], ..under("bsp", "none", "topk:0.1") };
    let error = outcome(&config, &tables()[..1]).unwrap_err();
    assert!(error.contains("drops late answers"), "{error}");
}

/// Rows are no blocks: pulls of them wait for everything.
#[test]
fn partial_pulling_is_refused_where_all_tables_are_of_rows() {
    let config = under("psp:c=1,b=0.5", "none", "none");
    let error = outcome(&config, &tables()[1..]).unwrap_err();
    assert!(error.contains("table `rows`: b and tau2 of `psp:c=1,b=0.5` are about the blocks"), "{error}");
    assert_eq!(outcome(&config, &tables()), Ok(()), "it is of use to the dense one");
    assert_eq!(outcome(&under("psp:c=1", "none", "none"), &tables()[1..]), Ok(()));
}

/// Workers are told when they declare their tables.
#[test]
fn a_job_whose_policies_do_not_fit_its_tables_does_not_start() {
    let mut bench = Bench::new(under("bsp", "none", "dvf:delta=1"), 1);
    let tickets = bench.declare_and_start(&[(TableSpec::sparse("rows", 10, 4), vec![0.0; 40])]);
    for (worker, ticket) in tickets.into_iter().enumerate() {
        let Some(Err(WorkerError::Refused { message, .. })) = bench.outcome(worker, ticket) else {
            panic!("worker {worker} was not refused");
        };
        assert!(message.contains("table `rows`: answers by `dvf:delta=1` are differences"), "{message}");
    }
}

#[test]
fn a_switch_is_checked_with_the_policies_that_it_meets() {
    let mut config = under("bsp", "none", "none");
    config.overrides = vec![PolicyOverride::new("dense", Policies::of([(Axis::AnswerCodec, "topk:0.1")]))];
    let mut bench = Bench::new(config, 1);
    bench.start(&[
        (TableSpec::dense("dense", [40]), vec![0.0; 40]),
        (TableSpec::dense("other", [40]), vec![0.0; 40]),
    ]);
    let switch = |bench: &mut Bench, table: &str, server: Option<u32>, sync: &str| {
        bench.set(PolicyOverride::new(table, Policies::of([(Axis::Sync, sync)])).on(server.map(ServerId)));
        let report = bench.shard(0).report(bench.now()).expect("it has joined");
        report.tables.iter().map(|table| table.sync.clone()).collect::<Vec<_>>()
    };
    assert_eq!(
        switch(&mut bench, "*", None, "psp:c=1,b=0.5"),
        ["bsp", "bsp"],
        "differences would be dropped"
    );
    assert_eq!(switch(&mut bench, "other", Some(0), "psp:c=1,b=0.9"), ["bsp", "psp:c=1,b=0.9"]);
    assert_eq!(switch(&mut bench, "other", Some(0), "psp:c=1"), ["bsp", "psp:c=1"]);
    assert_eq!(switch(&mut bench, "other", None, "psp:c=1,b=0.5"), ["bsp", "psp:c=1,b=0.5"]);
    assert_eq!(switch(&mut bench, "dense", None, "psp:c=1"), ["psp:c=1", "psp:c=1,b=0.5"]);
    assert_eq!(bench.worker(0).values(W), [0.0; 40]);
}
