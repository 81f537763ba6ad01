//! `paramill status`: what a running job is doing, and what it waits for.

use crate::args::StatusArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::{Align, Output, Table, WAIT_CAUSES, bytes, count};
use paramill_core::status::{
    AggregatorStatus, LinksReport, MemberState, MovesStatus, ReaderStatus, ReceiverStatus, RoomChange,
    ServedStatus, ShardReport, StalledStatus, Status, WorkerStatus,
};
use paramill_node::admin::Admin;
use paramill_node::url::JobUrl;
use std::time::Duration;

/// How long the coordinator may take for an answer.
const DEADLINE: Duration = Duration::from_secs(10);

pub(crate) fn run(args: &StatusArgs, output: &Output) -> Result<(), Failure> {
    let url = JobUrl::of_any_job(&args.url).or_usage()?;
    let status = Admin::connect(&url, DEADLINE)?.status()?;
    if output.json() {
        return Ok(output.object(&status)?);
    }
    let restarts = match status.restarts {
        0 => String::new(),
        restarts => format!("; {} so far", count(restarts, "restart")),
    };
    output.text(format!("job `{}`: {}{restarts}", status.job, status.phase))?;
    output.table(&workers(&status.workers))?;
    if !status.readers.is_empty() {
        output.table(&readers(&status.readers))?;
    }
    if !status.receivers.is_empty() {
        output.table(&receivers(&status.receivers))?;
    }
    if !status.aggregators.is_empty() {
        output.table(&aggregators(&status.aggregators))?;
    }
    output.table(&tables(&status.shards))?;
    for line in places(&status.served).into_iter().chain(moves(&status.moves)) {
        output.text(line)?;
    }
    for pack in &status.packs {
        output.text(format!("table `{}` is {}", pack.table, pack.layers.join(", ")))?;
    }
    let waited = status.waited.lines(WAIT_CAUSES);
    for line in waits(&status).into_iter().chain(waited).chain(thresholds(&status)) {
        output.text(line)?;
    }
    for StalledStatus { node, seconds, holds_up } in &status.stalled {
        output
            .text(format!("{node} lives and makes no progress for {seconds:.0} s: it holds up {holds_up}"))?;
    }
    for warning in &status.warnings {
        output.text(format!("warning: {warning}"))?;
    }
    Ok(())
}

fn readers(readers: &[ReaderStatus]) -> Table {
    let mut table = Table::new([
        ("reader", Align::Right),
        ("version", Align::Right),
        ("silent, s", Align::Right),
        ("received", Align::Right),
    ]);
    for reader in readers {
        table.row([
            reader.reader.to_string(),
            reader.version.map_or("none yet".to_owned(), |version| version.to_string()),
            format!("{:.1}", reader.silent_seconds),
            bytes(reader.bytes_received),
        ]);
    }
    table
}

/// Receivers of what is broadcast.
fn receivers(receivers: &[ReceiverStatus]) -> Table {
    let mut table = Table::new([
        ("receiver", Align::Left),
        ("version", Align::Right),
        ("takes it from", Align::Left),
        ("followers", Align::Right),
    ]);
    for receiver in receivers {
        table.row([
            receiver.receiver.clone(),
            receiver.version.map_or("none yet".to_owned(), |version| version.to_string()),
            receiver.takes_from.join(", "),
            receiver.followers.to_string(),
        ]);
    }
    table
}

fn workers(workers: &[WorkerStatus]) -> Table {
    let mut table = Table::new([
        ("worker", Align::Right),
        ("state", Align::Left),
        ("clock", Align::Right),
        ("silent, s", Align::Right),
        ("pushed", Align::Right),
        ("pulled", Align::Right),
        ("at once", Align::Right),
        ("waited, s", Align::Right),
        ("stale", Align::Right),
        ("waits for", Align::Left),
    ]);
    for worker in workers {
        let (report, reads) = (&worker.report, &worker.report.reads);
        table.row([
            worker.worker.0.to_string(),
            state(worker),
            report.clock.to_string(),
            format!("{:.1}", worker.silent_seconds),
            bytes(report.bytes_pushed),
            bytes(report.bytes_pulled),
            format!("{} of {}", reads.at_once, reads.at_once + reads.after_wait),
            format!("{:.1}", reads.waited_s),
            reads.max_staleness.to_string(),
            match worker.state {
                MemberState::Running | MemberState::Joining => {
                    let sentences = [&report.waiting, &report.holding].into_iter().flatten();
                    sentences.map(String::as_str).collect::<Vec<_>>().join("; ")
                }
                MemberState::Left | MemberState::Dead => String::new(),
            },
        ]);
    }
    table
}

/// A worker's state, and which process of its rank this is if it is not the first.
fn state(worker: &WorkerStatus) -> String {
    let state = format!("{:?}", worker.state).to_lowercase();
    match worker.incarnation {
        0 | 1 => state,
        life => format!("{state}, {} life", ordinal(life)),
    }
}

fn ordinal(number: u32) -> String {
    let suffix = match (number % 10, number % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    format!("{number}{suffix}")
}

fn aggregators(aggregators: &[AggregatorStatus]) -> Table {
    let mut table = Table::new([
        ("aggregator", Align::Right),
        ("address", Align::Left),
        ("state", Align::Left),
        ("through", Align::Left),
        ("workers", Align::Right),
        ("gradients a sum", Align::Right),
        ("from workers", Align::Right),
        ("to servers", Align::Right),
        ("from servers", Align::Right),
        ("to workers", Align::Right),
    ]);
    for aggregator in aggregators {
        let report = &aggregator.report;
        // The cores of one above have numbers of their own.
        let above = aggregators.iter().filter(|above| above.report.below.contains(&aggregator.aggregator));
        let above: Vec<String> = above.map(|above| above.aggregator.0.to_string()).collect();
        table.row([
            aggregator.aggregator.0.to_string(),
            aggregator.address.clone(),
            if aggregator.connected { "running" } else { "away" }.to_owned(),
            if above.is_empty() { "-".into() } else { format!("aggregator {}", above.join(", ")) },
            report.workers.to_string(),
            format!("{:.2}", report.gradients as f64 / report.groups.max(1) as f64),
            bytes(report.bytes_from_workers),
            bytes(report.bytes_to_servers),
            bytes(report.bytes_from_servers),
            bytes(report.bytes_to_workers),
        ]);
    }
    table
}

fn tables(shards: &[ShardReport]) -> Table {
    let mut table = Table::new([
        ("server", Align::Right),
        ("core", Align::Right),
        ("table", Align::Left),
        ("elements", Align::Right),
        ("sync", Align::Left),
        ("version", Align::Right),
        ("DPRs", Align::Right),
        ("mean staleness", Align::Right),
        ("waiting", Align::Right),
    ]);
    for shard in shards {
        for entry in &shard.tables {
            table.row([
                shard.shard.server.0.to_string(),
                shard.shard.core.to_string(),
                entry.name.clone(),
                entry.elements.to_string(),
                entry.sync.clone(),
                entry.version.to_string(),
                entry.stats.dprs.to_string(),
                format!("{:.2}", entry.stats.mean_staleness()),
                entry.waiting.len().to_string(),
            ]);
        }
    }
    table
}

/// Which shards have copies, where there are any, and which are not where they began.
fn places(served: &[ServedStatus]) -> Vec<String> {
    let copies = served.iter().filter(|served| served.copy.is_some()).count();
    let has_copies = served.iter().any(|served| served.copy.is_some() || served.copying.is_some());
    let copies =
        has_copies.then(|| format!("copies: {copies} of {} have one", count(served.len() as u32, "shard")));
    let is_elsewhere = |served: &&ServedStatus| served.server != Some(served.shard.server);
    let moved = served.iter().filter(is_elsewhere).map(|served| match served.server {
        Some(server) => format!("{} is served by {server}", served.shard),
        None => format!("{} is served by a server that has gone", served.shard),
    });
    copies.into_iter().chain(moved).collect()
}

/// Shards that have moved, and those that are to, where there are any.
fn moves(moves: &MovesStatus) -> Option<String> {
    let MovesStatus { shards, bytes: moved, planned, under_way } = *moves;
    let moved = format!("moves: {} so far, {}", count(shards as u32, "shard"), bytes(moved));
    let more = format!("; {planned} to go, of which {under_way} under way");
    match (shards, planned) {
        (0, 0) => None,
        (_, 0) => Some(moved),
        _ => Some(moved + &more),
    }
}

/// Who waits where, since when, and what would release it; and where conditions of worker 0 do not decide.
fn waits(status: &Status) -> Vec<String> {
    let mut lines = Vec::new();
    for shard in &status.shards {
        for table in &shard.tables {
            if table.stats.fallbacks > 0 {
                lines.push(format!(
                    "{} decided {} times by the fallback about pulls of table `{}`, since worker 0 gave no answer",
                    shard.shard, table.stats.fallbacks, table.name
                ));
            }
            for wait in &table.waiting {
                lines.push(format!(
                    "{} waits for table `{}` on {} for {:.1} s: {}",
                    wait.worker, table.name, shard.shard, wait.seconds, wait.reason
                ));
            }
        }
    }
    lines
}

/// Which threshold of `dvf` holds where, since when, and why, as far as it ever changed.
fn thresholds(status: &Status) -> Vec<String> {
    let workers = status.workers.iter().map(|worker| (worker.worker.to_string(), &worker.report.links));
    let shards = status.shards.iter().map(|shard| (shard.shard.to_string(), &shard.links));
    let line = |(node, links): (String, &Option<LinksReport>)| {
        let links = links.as_ref()?;
        let RoomChange { lacks_room, seconds_ago, cause } = links.last.last()?;
        let (threshold, changes) = (if *lacks_room { "up" } else { "low" }, count(links.changes, "change"));
        Some(format!("{node} uses dvf's `{threshold}` for {seconds_ago:.1} s ({changes}): {cause}"))
    };
    workers.chain(shards).filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinals() {
        let numbers = [1, 2, 3, 4, 11, 12, 13, 21, 22, 103, 111];
        let expected = ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "103rd", "111th"];
        assert_eq!(numbers.map(ordinal), expected);
    }
}
