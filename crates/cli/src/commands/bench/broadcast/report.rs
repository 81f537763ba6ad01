//! What came of broadcasts, for people and for programs.

use super::processes::Rounds;
use super::{Plan, STAR, Simulated};
use crate::commands::bench::statistics::Spread;
use crate::output::{Align, Output, Table};
use anyhow::Result;
use paramill_sim::broadcast::Bound;
use paramill_sim::report::LinkTraffic;
use serde::Serialize;

const MB: f64 = 1e6;
/// Links that are printed; JSON has all.
const BUSIEST: usize = 5;

/// Times are in seconds, for one version.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    broadcast: String,
    workers: u32,
    servers: u32,
    cores: u32,
    elements: u64,
    /// The part of each version that a filter leaves out.
    drop: f64,
    /// The codec that has the size of what is left.
    filter: Option<String>,
    chunk_bytes: u64,
    /// Of a chunk in a frame.
    payload_bytes: u64,
    /// Whether all of it happened in virtual time.
    simulated: bool,
    /// What moved.
    contents: &'static str,
    seconds: f64,
    /// A star that leaves out nothing.
    star_seconds: f64,
    /// Of the trees, with their filter, over that star.
    speedup: f64,
    /// A star that leaves out as much.
    filtered_star_seconds: Option<f64>,
    filtered_speedup: Option<f64>,
    /// What no way can beat: the longest time that a link needs for what must cross it.
    bound_seconds: Option<f64>,
    bound_link: Option<String>,
    /// Of a version on the busiest link, with headers.
    max_link_bytes: Option<u64>,
    /// The simulated network with every rate.
    network: Option<String>,
    /// Of a version in the simulation, the most bytes first.
    links: Vec<LinkTraffic>,
    /// Of real processes; none in virtual time.
    #[serde(skip_serializing_if = "Option::is_none")]
    processes: Option<Processes>,
}

#[derive(Debug, Serialize)]
struct Processes {
    rounds: u32,
    versions: u64,
    seconds_spread: Spread,
    star_seconds_spread: Spread,
    /// What the simulator says of the same.
    simulated_seconds: Option<f64>,
    simulated_star_seconds: Option<f64>,
    /// The measured time over the simulated one.
    ratio_to_simulated: Option<f64>,
    star_ratio_to_simulated: Option<f64>,
    /// Cores that all processes kept busy.
    busy_cores: f64,
    /// The system's load at the end.
    load: Option<f64>,
}

impl Report {
    pub(super) fn new(
        plan: &Plan,
        bound: Option<Bound>,
        simulated: Option<Simulated>,
        rounds: Option<Rounds>,
    ) -> Report {
        let sim = simulated.as_ref();
        let sim_star = sim.and_then(|sim| Some(sim.filtered_star.as_ref()?.seconds));
        let of_sim = sim.map(|sim| (sim.trees.seconds, sim.star.seconds, sim_star));
        let of_rounds = rounds.as_ref().map(|rounds| {
            let filtered = rounds.filtered_star.map(|star| star.median);
            (rounds.trees.median, rounds.star.median, filtered)
        });
        let nothing = (f64::NAN, f64::NAN, None);
        let (seconds, star_seconds, filtered_star_seconds) = of_rounds.or(of_sim).unwrap_or(nothing);
        let simulated_most = sim.and_then(|sim| Some(sim.trees.traffic.first()?.bytes));
        let max_link_bytes = match &rounds {
            Some(rounds) => rounds.most_link_bytes,
            None => simulated_most,
        };
        let experiment = &plan.experiment;
        Report {
            broadcast: plan.broadcast.clone(),
            workers: experiment.workers,
            servers: experiment.servers,
            cores: experiment.cores,
            elements: experiment.elements,
            drop: plan.drop,
            filter: plan.filter.clone(),
            chunk_bytes: experiment.chunk_bytes,
            payload_bytes: experiment.payload_bytes,
            simulated: rounds.is_none(),
            contents: match rounds {
                None => "sizes moved, contents did not; pushes and computation took no time",
                Some(_) => "everything, between processes",
            },
            seconds,
            star_seconds,
            speedup: star_seconds / seconds,
            filtered_star_seconds,
            filtered_speedup: filtered_star_seconds.map(|star| star / seconds),
            bound_seconds: bound.as_ref().map(|bound| bound.seconds),
            bound_link: bound.map(|bound| bound.link),
            max_link_bytes,
            network: sim.map(|sim| sim.trees.network.clone()),
            processes: rounds.map(|rounds| Processes {
                rounds: rounds.rounds,
                versions: rounds.versions,
                seconds_spread: rounds.trees,
                star_seconds_spread: rounds.star,
                simulated_seconds: of_sim.map(|(trees, ..)| trees),
                simulated_star_seconds: of_sim.map(|(_, star, _)| star),
                ratio_to_simulated: of_sim.map(|(trees, ..)| rounds.trees.median / trees),
                star_ratio_to_simulated: of_sim.map(|(_, star, _)| rounds.star.median / star),
                busy_cores: rounds.busy_cores,
                load: rounds.load,
            }),
            links: simulated.map(|sim| sim.trees.traffic).unwrap_or_default(),
        }
    }

    pub(super) fn print(&self, output: &Output) -> Result<()> {
        if output.json() {
            return Ok(output.object(self)?);
        }
        let Report { broadcast, workers, servers, elements, .. } = self;
        output.text(format!(
            "{broadcast} of {elements} parameters, {servers} servers, {workers} workers; {}",
            self.contents
        ))?;
        if let Some(network) = &self.network {
            output.text(network)?;
        }
        let mut table = Table::new([("", Align::Left), ("", Align::Right)]);
        let mut row = |name: String, value: String| table.row([name, value]);
        row("a version, s".into(), format!("{:.4}", self.seconds));
        row(format!("{STAR}, s"), format!("{:.4}", self.star_seconds));
        row("times as fast".into(), format!("{:.2}", self.speedup));
        if let (Some(filter), Some(seconds), Some(speedup)) =
            (&self.filter, self.filtered_star_seconds, self.filtered_speedup)
        {
            let (bytes, chunk) = (self.payload_bytes, self.chunk_bytes);
            row(format!("{filter}, bytes of {chunk}"), bytes.to_string());
            row(format!("{STAR} with it, s"), format!("{seconds:.4}"));
            row("times as fast as that".into(), format!("{speedup:.2}"));
        }
        if let (Some(seconds), Some(link)) = (self.bound_seconds, &self.bound_link) {
            row(format!("bound, s ({link})"), format!("{seconds:.4}"));
        }
        if let Some(bytes) = self.max_link_bytes {
            row("busiest link, MB".into(), format!("{:.3}", bytes as f64 / MB));
        }
        if let Some(processes) = &self.processes {
            row("medians of rounds".into(), processes.rounds.to_string());
            row("a version, s".into(), processes.seconds_spread.words());
            row(format!("{STAR}, s"), processes.star_seconds_spread.words());
            if let (Some(trees), Some(star)) = (processes.simulated_seconds, processes.simulated_star_seconds)
            {
                row("simulated, s".into(), format!("{trees:.4}"));
                row(format!("{STAR} simulated, s"), format!("{star:.4}"));
            }
            row("cores kept busy".into(), format!("{:.2}", processes.busy_cores));
        } else {
            for LinkTraffic { link, bytes, busy_s, .. } in self.links.iter().take(BUSIEST) {
                row(format!("{link}, MB"), format!("{:.3}, busy for {busy_s:.4} s", *bytes as f64 / MB));
            }
        }
        Ok(output.table(&table)?)
    }
}
