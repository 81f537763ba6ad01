//! When gradients leave and in which order: layer by layer against all at the end, with and without priority of front layers.
//!
//! Four hosts with a server and a worker each, as in MPS's Figure 5.4; virtual time, so that ratios are exact.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_sim::report::{Report, run_scenario};
use paramill_sim::scenario::Scenario;

/// ResNet-110 at MPS's 13.5 steps per second on links of 1 Gbit/s, or as `network` says.
fn run(send: &str, policies: &str, network: &str) -> Report {
    run_with_window(send, 256 << 10, policies, network)
}

/// The same with connections that hold so many bytes.
fn run_with_window(send: &str, window_bytes: u64, policies: &str, network: &str) -> Report {
    let text = format!(
        "workers = 4\nservers = 4\ncolocated = true\niterations = 5\n{policies}\n[network]\ngbit_per_s = 1\njitter_us = 0\n\
         window_bytes = {window_bytes}\n{network}\n[compute]\nmodel = 'resnet110_cifar'\nsend = '{send}'\nstep_ms = {}\njitter = 0",
        1e3 / 13.5
    );
    let report = run_scenario(&Scenario::parse(&text).unwrap()).unwrap();
    assert!(report.finished, "{:?}", report.stalled);
    report
}

#[test]
fn gradients_that_leave_by_layers_hide_their_transfer_behind_computation() {
    let (end, layerwise) = (run("end", "", ""), run("layerwise", "", ""));
    let speedup = end.seconds / layerwise.seconds;
    // All of 157 ms is waited for one after the other at the end: 74 ms of computation, 83 ms on the links.
    assert!((5.0 * 0.157..5.0 * 0.175).contains(&end.seconds), "{}", end.seconds);
    assert!(speedup > 1.4, "{speedup}");
    assert_eq!(end.tables, layerwise.tables, "and what is learned is the same, bit for bit");
}

#[test]
fn headers_of_packets_take_their_time_on_links() {
    let (bare, packets) = (run("end", "", ""), run("end", "", "mtu = 1500"));
    let computation = 5.0 / 13.5;
    let ratio = (packets.seconds - computation) / (bare.seconds - computation);
    // 66 bytes for each 1448, and what is no transfer takes no longer.
    assert!((1.040..1.046).contains(&ratio), "{ratio}");
    assert!(packets.network.contains("packets of 1500 bytes"), "{}", packets.network);
    assert_eq!(bare.tables, packets.tables, "and what is learned is the same, bit for bit");
}

#[test]
fn front_layers_overtake_where_links_are_what_is_waited_for() {
    // Frames count four times on links: about what Inception-v4 is at 1.47 steps per second.
    let network = "wire_scale = 4";
    let [end, fifo, front] = [("end", "front"), ("layerwise", "none"), ("layerwise", "front")]
        .map(|(send, priority)| run(send, &format!("priority = '{priority}'"), network));
    let (in_turn, overtaking) = (end.seconds / fifo.seconds, end.seconds / front.seconds);
    assert!(overtaking > 1.2, "{overtaking}");
    assert!(overtaking > in_turn * 1.03, "{in_turn} in turn, {overtaking} with priority");
    assert_eq!(fifo.tables, front.tables, "and what is learned is the same, bit for bit");
}

#[test]
fn frames_that_a_connection_holds_are_not_overtaken() {
    let [small, large] = [262_144, 1 << 20].map(|bytes| run_with_window("layerwise", bytes, "", "").seconds);
    assert!(large > small * 1.05, "{small} s with a small window, {large} s with a large one");
}

#[test]
fn an_iteration_by_layers_has_the_same_results_over_every_kind_of_table() {
    let text = |send: &str| {
        format!(
            "workers = 3\nservers = 2\niterations = 12\nchunk = '64B'\n[[tables]]\nname = 'a'\nshape = [200]\n[[tables]]\n\
             name = 'rows'\nshape = [40, 3]\nrows = true\n[[tables]]\nname = 'b'\nshape = [90]\nmacs = 7\n[compute]\nsend = '{send}'"
        )
    };
    let [end, layerwise] =
        ["end", "layerwise"].map(|send| run_scenario(&Scenario::parse(&text(send)).unwrap()).unwrap());
    assert!(layerwise.finished, "{:?}", layerwise.stalled);
    assert_eq!(end.tables, layerwise.tables);
}
