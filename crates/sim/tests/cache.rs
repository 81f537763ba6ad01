//! A cache under SSP: workers compute on what they have within the bound, and pushes and pulls travel meanwhile.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use paramill_core::types::Time;
use paramill_sim::checkers::{Checkers, ExactlyOnce, Staleness};
use paramill_sim::cluster::{Cluster, Play};
use paramill_sim::report::Report;
use paramill_sim::scenario::Scenario;
use std::collections::BTreeSet;

/// Eight workers whose iterations sometimes take twice as long, and a server whose link they share. A pull or a push of all of
/// them takes as long as an iteration.
fn run(sync: &str, slabs: bool) -> Report {
    let text = format!(
        "workers = 8\nservers = 1\ncores = 2\niterations = 200\nsync = '{sync}'\ntags = true\norder = 'arrival'\n\
         optimizer = 'sgd:lr=1'\nreduce = 'sum'\n\
         [[tables]]\nname = 'w'\nshape = [40000]\n\
         [compute]\nstep_ms = 20\njitter = 0.1\nstraggle_p = 0.1\nstraggle_factor = 2\n\
         [network]\ngbit_per_s = 0.4\nlatency_us = 200\n"
    );
    let scenario = Scenario::parse(&text).unwrap();
    let play = Play { gradients: scenario.gradients(), slabs, watches_memory: true, ..Play::default() };
    let mut cluster = Cluster::with(&scenario, play).unwrap();
    let mut checkers = Checkers::default();
    let nobody = BTreeSet::new();
    checkers.add(Staleness::new(&cluster, scenario.gradients(), &nobody, &nobody).unwrap());
    checkers.add(ExactlyOnce::new(&cluster, &nobody).unwrap());
    let over = cluster.run(Time::from_secs_f64(1e3), &mut checkers).unwrap();
    assert!(over, "{sync}: {:?}", Report::of(&cluster).workers);
    checkers.at_end(&cluster).unwrap();
    Report::of(&cluster)
}

/// The ratio is one of virtual times, which are the same on every machine.
#[test]
fn with_a_cache_ssp_makes_a_fifth_more_iterations_a_second_over_a_loaded_link() {
    for (model, bound, slabs) in [
        ("ssp:s=3", 3, false),
        ("ssp:s=3", 3, true),
        ("dsps:min=3,max=5", 5, false),
        ("dsps:min=3,max=5", 5, true),
        ("pssp:s=3,c=0.5", 200, false),
        ("pssp:s=3,c=0.5", 200, true),
    ] {
        let (cached, waiting) = (run(model, slabs), run(&format!("{model},cache=off"), slabs));
        let line = |report: &Report| {
            let (reads, seconds) = (report.reads, report.seconds);
            let (pushed, pulled) = (report.bytes_pushed >> 20, report.bytes_pulled >> 20);
            let load = report.link_load();
            format!("{seconds:.2} s, {pushed} MiB pushed, {pulled} MiB pulled, link {load:.2}, {reads:?}")
        };
        let figures =
            format!("{model}, slabs: {slabs}\ncache=on:  {}\ncache=off: {}", line(&cached), line(&waiting));
        assert!(waiting.seconds >= 1.2 * cached.seconds, "{figures}");
        assert!(cached.reads.max_staleness <= bound && waiting.reads.max_staleness <= bound, "{figures}");
        assert!(cached.reads.at_once > cached.reads.after_wait && waiting.reads.at_once == 0, "{figures}");
        // Every gradient is pushed; pulls that nobody has to wait for are left out.
        assert_eq!(cached.bytes_pushed, waiting.bytes_pushed, "{figures}");
        assert!(cached.bytes_pulled < waiting.bytes_pulled, "{figures}");
    }
}
