//! Whole worlds from seeds: a cluster, a job, a network, faults. First faults and safety, then everything heals and
//! progress is demanded.

mod components;
mod dice;
mod draw;

pub use draw::Drawn;

use crate::canary::Canary;
use crate::checkers::{
    Checkers, Copies, ExactlyOnce, Held, Memory, Owners, Readers, Replicas, Staleness, Trace,
};
use crate::cluster::Cluster;
use crate::compute::SendMode;
use crate::gradient::Gradients;
use crate::network::Topology;
use crate::report::{Report, run_scenario};
use crate::scenario::ScenarioError;
use crate::world::{Ended, Violation};
use paramill_core::registry::Registry;
use paramill_core::types::{NodeId, WorkerId};
use serde::Serialize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

/// How a world ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "outcome", content = "what")]
pub enum Outcome {
    /// Every promise was kept and every worker finished.
    Passed,
    /// A promise about the data was broken.
    Correctness(String),
    /// Somebody failed, or did not finish after everything had healed.
    Liveness(String),
    /// Something panicked.
    Crash(String),
}

impl Outcome {
    /// Whether nothing was found.
    pub fn is_passed(&self) -> bool {
        *self == Outcome::Passed
    }

    /// How bad a finding is, to be compared: wrong data is worse than a panic, and a panic than no progress.
    pub fn severity(&self) -> u8 {
        match self {
            Outcome::Passed => 0,
            Outcome::Liveness(_) => 1,
            Outcome::Crash(_) => 2,
            Outcome::Correctness(_) => 3,
        }
    }

    /// What a process should exit with: 0 when nothing was found, and a number of its own for each kind of finding.
    pub fn exit_code(&self) -> u8 {
        match self {
            Outcome::Passed => 0,
            Outcome::Correctness(_) => 3,
            Outcome::Liveness(_) => 4,
            Outcome::Crash(_) => 5,
        }
    }
}

/// One world and how it ended.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SeedResult {
    /// The seed that gives the same world again.
    pub seed: u64,
    /// How it ended.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// The world in a few words.
    pub world: String,
    /// Virtual time.
    pub seconds: f64,
    /// Events.
    pub events: u64,
    /// The components of the world, as `axis/name`, and what happened in it, of [`EVENTS`].
    #[serde(skip)]
    pub drawn: Vec<String>,
}

/// What a swarm makes happen in its worlds beside its components.
pub const EVENTS: [&str; 16] = [
    "cache",
    "drain",
    "handover",
    "held",
    "join",
    "landing",
    "layerwise",
    "local",
    "nan",
    "reader",
    "restart",
    "rows-broadcast",
    "slab",
    "status",
    "switch",
    "three-tier",
];

/// Everything that a swarm draws: `axis/name` for each registered component, and [`EVENTS`].
pub fn drawable() -> Vec<String> {
    let events = EVENTS.iter().map(|event| (*event).to_owned());
    components::registered(&Registry::builtin()).into_iter().chain(events).collect()
}

/// Runs the world of one seed, with a planted bug or without.
pub fn run_seed(seed: u64, canary: Option<Canary>) -> SeedResult {
    run_world(seed, canary, None)
}

/// Runs the world of one seed and hands over every frame in it as a line of text, then the last lines of its log.
pub fn trace_seed(seed: u64, canary: Option<Canary>, line: fn(&str)) -> SeedResult {
    run_world(seed, canary, Some(line))
}

fn run_world(seed: u64, canary: Option<Canary>, trace: Option<fn(&str)>) -> SeedResult {
    let mut result = SeedResult {
        seed,
        outcome: Outcome::Passed,
        world: String::new(),
        seconds: 0.0,
        events: 0,
        drawn: Vec::new(),
    };
    let drawn = match Drawn::new(seed, &Registry::builtin()) {
        Ok(drawn) => drawn,
        Err(why) => return SeedResult { outcome: Outcome::Crash(why), ..result },
    };
    result.world = drawn.to_string();
    let ran = catch_unwind(AssertUnwindSafe(|| play(&drawn, canary, trace, &mut result)));
    result.outcome = ran.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Outcome::Crash(text.unwrap_or("a panic without a message").to_owned())
    });
    result
}

/// Runs the worlds of many seeds on all processors and hands over each result as it comes, in no order. Ends early
/// when `on_result` says false.
pub fn run_seeds(
    seeds: impl Iterator<Item = u64>,
    canary: Option<Canary>,
    mut on_result: impl FnMut(SeedResult) -> bool,
) {
    let seeds: Vec<u64> = seeds.collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (results, inbox) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (seeds, next, stop, results) = (&seeds, &next, &stop, results.clone());
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed)
                    && let Some(&seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed))
                    && results.send(run_seed(seed, canary)).is_ok()
                {}
            });
        }
        drop(results);
        for result in inbox {
            if !on_result(result) {
                stop.store(true, Ordering::Relaxed);
                break;
            }
        }
    });
}

/// The first world, counted from `seed`, in which a planted bug is found; `None` when `tries` worlds hide it.
pub fn hunt(canary: Canary, seed: u64, tries: u64) -> Option<SeedResult> {
    (seed..seed.saturating_add(tries))
        .map(|seed| run_seed(seed, Some(canary)))
        .find(|result| !result.outcome.is_passed())
}

fn play(drawn: &Drawn, canary: Option<Canary>, trace: Option<fn(&str)>, result: &mut SeedResult) -> Outcome {
    let mut cluster = match drawn.cluster(canary) {
        Ok(cluster) => cluster,
        Err(error) => return Outcome::Crash(format!("the world cannot be set up: {error}")),
    };
    let mut checkers = match checkers(drawn, &cluster, trace) {
        Ok(checkers) => checkers,
        Err(error) => return Outcome::Crash(format!("the checkers cannot be set up: {error}")),
    };
    let ran = run_and_heal(drawn, &mut cluster, &mut checkers);
    if let Some(line) = trace {
        cluster.world.log().for_each(line);
    }
    result.seconds = cluster.world.now().as_secs_f64();
    let counts = cluster.world.counts();
    result.events = counts.events;
    let nans: u64 = cluster.worker_ids().map(|worker| cluster.player(worker).nans()).sum();
    // A restart of a worker and a late one are seen when they take part.
    let takes_part = |worker: &WorkerId| cluster.player(*worker).first_clock().is_some();
    let late = |worker: &WorkerId| worker.0 >= drawn.scenario.workers;
    let has_joined = cluster.worker_ids().filter(late).any(|worker| takes_part(&worker));
    let has_rows = drawn.scenario.tables.iter().any(|table| table.rows);
    let is_at_once = |worker: WorkerId| cluster.player(worker).worker().report().reads.at_once > 0;
    let has_held = |worker: WorkerId| {
        let updates = cluster.player(worker).worker().report().updates;
        updates.is_some_and(|updates| updates.held > 0)
    };
    let happened = [
        ("cache", cluster.worker_ids().any(is_at_once)),
        ("drain", !drawn.scenario.drains.is_empty()),
        ("handover", counts.handovers > 0),
        ("held", cluster.worker_ids().any(has_held)),
        ("join", has_joined),
        ("landing", counts.landings > 0),
        ("layerwise", drawn.scenario.compute.send == SendMode::Layerwise),
        ("local", drawn.scenario.policy.is_local()),
        ("nan", nans > 0),
        ("reader", drawn.scenario.readers > 0),
        ("restart", counts.restarts > 0),
        ("rows-broadcast", drawn.scenario.policy.is_broadcast() && has_rows),
        ("slab", drawn.play.slabs),
        ("status", drawn.scenario.status_every_s > 0.0),
        ("switch", !drawn.scenario.switches.is_empty()),
        ("three-tier", drawn.scenario.network.topology != Topology::Star),
    ];
    let happened = happened.iter().filter(|(_, happened)| *happened).map(|(event, _)| (*event).to_owned());
    result.drawn = drawn.components.iter().cloned().chain(happened).collect();
    match ran.and_then(|over| finish(drawn, &cluster, &mut checkers, over)) {
        Ok(()) => Outcome::Passed,
        Err(outcome) => outcome,
    }
}

/// Faults first, then healing. Says whether the job came to its end.
fn run_and_heal(drawn: &Drawn, cluster: &mut Cluster, checkers: &mut Checkers) -> Result<bool, Outcome> {
    let broken = |violation: Violation| Outcome::Correctness(violation.to_string());
    cluster.run(drawn.heal_at, checkers).map_err(broken)?;
    cluster.world.rules().clear();
    cluster.run(drawn.deadline, checkers).map_err(broken)
}

/// What must hold once the job is over.
fn finish(drawn: &Drawn, cluster: &Cluster, checkers: &mut Checkers, over: bool) -> Result<(), Outcome> {
    if ended_early(drawn, cluster) {
        return Ok(());
    }
    let now = cluster.world.now();
    let survivors = || cluster.worker_ids().filter(|worker| !may_lack(drawn, cluster, *worker));
    for worker in survivors() {
        let player = cluster.player(worker);
        if !player.is_finished() {
            let last: Vec<&str> = cluster.world.log().collect();
            let last = last.iter().rev().take(5).rev().copied().collect::<Vec<_>>().join("; ");
            return Err(Outcome::Liveness(format!(
                "{worker} has done {} of {} iterations {:.1} s after everything had healed: {} (slowest: {}; last words: {last})",
                player.clock(),
                drawn.scenario.iterations,
                now.since(drawn.heal_at).as_secs_f64(),
                player.doing(now),
                slowest(cluster),
            )));
        }
    }
    if !over {
        return Err(Outcome::Liveness(format!(
            "all workers finished, but the coordinator has not ended the job {:.1} s after everything had healed",
            now.since(drawn.heal_at).as_secs_f64()
        )));
    }
    checkers.at_end(cluster).map_err(Outcome::Correctness)?;
    compare_with_calm(drawn, cluster)
}

/// The worker that is furthest behind, and what it does: it may be what the others wait for.
fn slowest(cluster: &Cluster) -> String {
    let clock = |worker: &WorkerId| cluster.player(*worker).clock();
    let unfinished = cluster.worker_ids().filter(|worker| !cluster.player(*worker).is_finished());
    let slowest = unfinished.min_by_key(clock);
    slowest.map_or(String::new(), |worker| {
        format!("{worker} {}", cluster.player(worker).doing(cluster.world.now()))
    })
}

/// Whether a worker need not have finished: one that may die, or one that was started late or anew and came too late. The
/// job was over then, well or since all others had died, or had counted it among those that left.
fn may_lack(drawn: &Drawn, cluster: &Cluster, worker: WorkerId) -> bool {
    if drawn.mortal.contains(&worker) {
        return true;
    }
    let player = cluster.player(worker);
    let is_new = drawn.reborn.contains(&worker) || worker.0 >= drawn.scenario.workers;
    let is_over = match cluster.world.ended(NodeId::Coordinator) {
        Some(Ended::Stopped { error }) => error.as_ref().is_none_or(|why| why == "all workers died"),
        _ => false,
    };
    let has_left = player.error().is_some_and(|error| error.to_string().contains("its work is done"));
    let is_away = cluster.world.ended(NodeId::Worker(worker)) == Some(&Ended::Crashed);
    is_new && ((is_over && (is_away || player.first_clock().is_none())) || has_left)
}

/// Whether somebody died before the job could begin: it waits for a replacement, or cannot be had at all without the
/// initial values of worker 0, and says so.
fn ended_early(drawn: &Drawn, cluster: &Cluster) -> bool {
    let is_unborn = |worker: &WorkerId| cluster.player(*worker).times().started.is_none();
    let unborn = drawn.mortal.iter().any(is_unborn);
    let planned = cluster.worker_ids().any(|worker| cluster.player(worker).worker().workers().is_some());
    let lost_values = match cluster.world.ended(NodeId::Coordinator) {
        Some(Ended::Stopped { error: Some(error) }) => error.contains("worker 0 was gone before"),
        _ => false,
    };
    let first = WorkerId(0);
    let first_died = drawn.reborn.contains(&first) || (unborn && drawn.mortal.contains(&first));
    (unborn && !planned) || (lost_values && first_died)
}

/// A synchronous job with ranked addition ends with the same bits whatever the network did.
fn compare_with_calm(drawn: &Drawn, cluster: &Cluster) -> Result<(), Outcome> {
    if !drawn.has_calm_twin() {
        return Ok(());
    }
    let calm =
        run_scenario(&drawn.calm()).map_err(|error| Outcome::Crash(format!("the calm twin: {error}")))?;
    let rough = Report::of(cluster);
    let differs = calm.tables.iter().zip(&rough.tables).find(|(calm, rough)| calm.hash != rough.hash);
    match differs {
        None => Ok(()),
        Some((table, _)) => Err(Outcome::Correctness(format!(
            "table `{}` ended with other bits than without faults, although the job was synchronous",
            table.name
        ))),
    }
}

fn checkers(drawn: &Drawn, cluster: &Cluster, trace: Option<fn(&str)>) -> Result<Checkers, ScenarioError> {
    let mut checkers = Checkers::default();
    if let Some(line) = trace {
        checkers.add(Trace::new(line));
    }
    if matches!(drawn.play.gradients, Gradients::Tagged { .. }) {
        // What a process held back is lost with it.
        let holds = Held::new(cluster)?.is_some();
        let reborn = drawn.reborn.iter().filter(|_| holds);
        checkers.add(ExactlyOnce::new(cluster, &drawn.mortal.iter().chain(reborn).copied().collect())?);
    }
    checkers.add(Staleness::new(cluster, drawn.play.gradients, &drawn.mortal, &drawn.reborn)?);
    checkers.add(Replicas::new(cluster)?);
    checkers.add(Memory::new(cluster)?);
    if drawn.scenario.replicas > 0 {
        checkers.add(Copies::default());
        checkers.add(Owners::default());
    }
    if let Some(held) = Held::new(cluster)? {
        checkers.add(held);
    }
    if drawn.scenario.readers > 0 {
        checkers.add(Readers::new(cluster));
    }
    Ok(checkers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worlds_keep_their_promises() {
        for seed in 0..60 {
            let result = run_seed(seed, None);
            assert!(result.outcome.is_passed(), "{result:#?}");
        }
    }

    /// Worlds of the last bugs that were found. A seed is worth something until the drawing changes: each of them has a test of
    /// its story too, in `cluster`, in `tests/roles`, or beside the role.
    #[test]
    fn worlds_that_broke_a_promise_once_keep_it() {
        for seed in [2372, 6003, 10467, 33304, 40336, 504007, 601734, 617463, 622265, 900219, 1003136] {
            let result = run_seed(seed, None);
            assert!(result.outcome.is_passed(), "{result:#?}");
        }
    }

    #[test]
    fn a_seed_gives_the_same_world_again() {
        assert_eq!(run_seed(7, None), run_seed(7, None));
    }

    #[test]
    fn planted_bugs_are_found_each_by_its_own_promise() {
        for (canary, sentence) in [
            (Canary::Forgetful, "a push was applied twice"),
            (Canary::Hasty, "asks for"),
            (Canary::Partial, "with other bits than"),
            (Canary::Absent, "after everything had healed"),
            (Canary::Stale, "with other bits than"),
            (Canary::Early, "an acknowledged push was lost"),
            (Canary::Outdated, "the payload was made by another codec"),
            (Canary::Reused, "changed while"),
            (Canary::Dated, "an acknowledged push was lost"),
            (Canary::Outlived, "computes iteration"),
            (Canary::Anonymous, "a push was applied twice"),
            (Canary::Ungated, "an acknowledged push was lost"),
            (Canary::Stubborn, "which was given to another process"),
        ] {
            // A bug may be seen by its consequences first; the promise that it breaks is broken soon.
            let is_it = |seed| match run_seed(seed, Some(canary)).outcome {
                Outcome::Correctness(what) | Outcome::Liveness(what) => what.contains(sentence),
                Outcome::Passed | Outcome::Crash(_) => false,
            };
            assert!((0..800).any(is_it), "{canary:?} is not found");
        }
    }

    /// Copies are slabs in some worlds, in which their age is watched as well.
    #[test]
    fn slabs_that_are_too_old_are_found() {
        let is_it = |seed: &u64| Drawn::new(*seed, &Registry::builtin()).expect("it is a world").play.slabs;
        let is_found = |seed| match run_seed(seed, Some(Canary::Outlived)).outcome {
            Outcome::Correctness(what) => what.contains("computes iteration"),
            Outcome::Passed | Outcome::Liveness(_) | Outcome::Crash(_) => false,
        };
        assert!((0..800).filter(is_it).any(is_found));
    }

    #[test]
    fn results_of_many_seeds_come_once_each() {
        let mut seeds = Vec::new();
        run_seeds(0..6, None, |result| {
            seeds.push(result.seed);
            true
        });
        seeds.sort();
        assert_eq!(seeds, [0, 1, 2, 3, 4, 5]);
    }
}
