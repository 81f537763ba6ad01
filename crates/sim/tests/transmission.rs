//! When gradients leave and in which order: layer by layer against all at the end, with and without priority of front layers.
//!
//! Four hosts with a server and a worker each, on links of 1 Gbit/s, as in MPS's Figure 5.4; virtual time, so that ratios are exact.

use paramill_sim::report::Report;
use paramill_sim::scenario::Scenario;

/// A model at its step rate on one machine.
fn run(model: &str, step_ms: f64, send: &str, more: &str) -> Report {
    let text = format!(
        "workers = 4\nservers = 4\ncolocated = true\niterations = 4\n{more}\n[network]\ngbit_per_s = 1\nlatency_us = 50\njitter_us = 0\n\
         window_bytes = 262144\n[compute]\nmodel = '{model}'\nsend = '{send}'\nstep_ms = {step_ms}\njitter = 0"
    );
    paramill_sim::report::run_scenario(&Scenario::parse(&text).unwrap()).unwrap()
}

#[test]
fn probe() {
    for (model, ms) in [("resnet110_cifar", 1e3 / 13.5), ("inception_v4", 1e3 / 1.47)] {
        for send in ["end", "layerwise"] {
            let report = run(model, ms, send, "");
            println!("{model} {send}: {:?}", report.seconds);
        }
    }
}
