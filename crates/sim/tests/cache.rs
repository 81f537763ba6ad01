//! A cache under SSP: workers compute on what they have within the bound, and pushes and pulls travel meanwhile.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use paramill_core::types::Time;
use paramill_sim::canary::Canary;
use paramill_sim::checkers::{Checkers, ExactlyOnce, Staleness};
use paramill_sim::cluster::{Cluster, Play};
use paramill_sim::report::Report;
use paramill_sim::scenario::Scenario;
use std::collections::BTreeSet;

/// Eight workers whose iterations sometimes take longer, and a server whose link they share. A pull or a push of all of them takes as
/// long as an iteration.
fn scenario(sync: &str, straggle: Straggle) -> Scenario {
    let Straggle { p, factor } = straggle;
    let text = format!(
        "workers = 8\nservers = 1\ncores = 2\niterations = 200\nsync = '{sync}'\ntags = true\norder = 'arrival'\n\
         optimizer = 'sgd:lr=1'\nreduce = 'sum'\n\
         [[tables]]\nname = 'w'\nshape = [40000]\n\
         [compute]\nstep_ms = 20\njitter = 0.1\nstraggle_p = {p}\nstraggle_factor = {factor}\n\
         [network]\ngbit_per_s = 0.4\nlatency_us = 200\n"
    );
    Scenario::parse(&text).unwrap()
}

/// How often iterations take longer, and how much.
#[derive(Clone, Copy)]
struct Straggle {
    p: f64,
    factor: f64,
}

const MILD: Straggle = Straggle { p: 0.1, factor: 2.0 };

/// Runs a scenario, of which the checkers may find that it breaks a promise.
fn check(scenario: &Scenario, slabs: bool, canary: Option<Canary>) -> Result<Report, String> {
    let play =
        Play { gradients: scenario.gradients(), slabs, watches_memory: true, canary, ..Play::default() };
    let mut cluster = Cluster::with(scenario, play).unwrap();
    let mut checkers = Checkers::default();
    let nobody = BTreeSet::new();
    checkers.add(Staleness::new(&cluster, scenario.gradients(), &nobody, &nobody).unwrap());
    checkers.add(ExactlyOnce::new(&cluster, &nobody).unwrap());
    let over =
        cluster.run(Time::from_secs_f64(1e3), &mut checkers).map_err(|violation| violation.to_string())?;
    assert!(over, "{:?}", Report::of(&cluster).workers);
    checkers.at_end(&cluster)?;
    Ok(Report::of(&cluster))
}

fn run(sync: &str, straggle: Straggle, slabs: bool) -> Report {
    check(&scenario(sync, straggle), slabs, None).unwrap_or_else(|broken| panic!("{sync}: {broken}"))
}

/// The ratio is one of virtual times, which are the same on every machine.
#[test]
fn with_a_cache_ssp_makes_a_fifth_more_iterations_a_second_over_a_loaded_link() {
    let models = [("ssp:s=3", 3), ("dsps:min=3,max=5", 5), ("pssp:s=3,c=0.5", 200)];
    // A worker that hits its bound goes on as soon as its copy would do again: it does not wait until the slow one has caught up.
    let severe = [Straggle { p: 0.02, factor: 5.0 }, Straggle { p: 0.05, factor: 5.0 }].map(|of| (of, false));
    let all = severe.into_iter().chain([(MILD, false), (MILD, true)]);
    for ((model, bound), (straggle, slabs)) in
        models.into_iter().flat_map(|model| all.clone().map(move |of| (model, of)))
    {
        let (cached, waiting) =
            (run(model, straggle, slabs), run(&format!("{model},cache=off"), straggle, slabs));
        let line = |report: &Report| {
            let (reads, seconds) = (report.reads, report.seconds);
            let (pushed, pulled) = (report.bytes_pushed >> 20, report.bytes_pulled >> 20);
            let load = report.link_load();
            format!("{seconds:.2} s, {pushed} MiB pushed, {pulled} MiB pulled, link {load:.2}, {reads:?}")
        };
        let figures = format!(
            "{model}, slabs: {slabs}, {} of the steps {} times as long\ncache=on:  {}\ncache=off: {}",
            straggle.p,
            straggle.factor,
            line(&cached),
            line(&waiting)
        );
        assert!(waiting.seconds >= 1.2 * cached.seconds, "{figures}");
        assert!(cached.reads.max_staleness <= bound && waiting.reads.max_staleness <= bound, "{figures}");
        let is_mild = straggle.factor <= MILD.factor;
        assert!(cached.reads.at_once > cached.reads.after_wait || !is_mild, "{figures}");
        assert_eq!(waiting.reads.at_once, 0, "{figures}");
        // Every gradient is pushed; pulls that nobody has to wait for are left out.
        assert_eq!(cached.bytes_pushed, waiting.bytes_pushed, "{figures}");
        assert!(cached.bytes_pulled < waiting.bytes_pulled || !is_mild, "{figures}");
    }
}

/// Workers that compute layer by layer read each table when its forward begins.
#[test]
fn a_copy_beyond_the_bound_is_found_layer_by_layer_too() {
    for send in ["end", "layerwise"] {
        let text = format!(
            "workers = 4\nservers = 1\ncores = 1\niterations = 40\nsync = 'ssp:s=1'\ntags = true\norder = 'arrival'\n\
             optimizer = 'sgd:lr=1'\nreduce = 'sum'\n\
             [[tables]]\nname = 'a'\nshape = [400]\n[[tables]]\nname = 'b'\nshape = [4000]\n\
             [compute]\nstep_ms = 20\njitter = 0.1\nstraggle_p = 0.1\nstraggle_factor = 5\nsend = '{send}'\n\
             [network]\ngbit_per_s = 0.4\nlatency_us = 200\n"
        );
        let scenario = Scenario::parse(&text).unwrap();
        check(&scenario, false, None).unwrap_or_else(|broken| panic!("{send}: {broken}"));
        let broken = check(&scenario, false, Some(Canary::Outlived)).expect_err("a promise is broken");
        assert!(broken.contains("computes iteration"), "{send}: {broken}");
    }
}
