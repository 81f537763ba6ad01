//! A shard has one owner: a process that it was taken from applies nothing that the next one lacks.

use super::Checker;
use crate::actor::Actor;
use paramill_core::types::{NodeId, ProcessId, ShardId, Time};
use std::collections::BTreeMap;

/// A log of the shard's inputs, by the process that writes it and the upper half of its entries' numbers, which no other log has.
type LogId = (ShardId, ProcessId, u32);

/// Watches shards that are given to other processes.
#[derive(Debug, Default)]
pub struct Owners {
    /// How much of which log each core has that keeps a copy. A process may have cores that have yet to hear that they serve no more.
    copies: BTreeMap<(ShardId, ProcessId, u32), (LogId, u64)>,
    /// How much of a log was there when another process took over from the one that wrote it.
    ended: BTreeMap<LogId, u64>,
    /// How much was in a log when it began. A process that takes over begins with entries of its own, in which nobody has said anything:
    /// one that hears late of a plan that is over may have applied these.
    began: BTreeMap<LogId, u64>,
}

fn log(shard: ShardId, (writer, entries): (ProcessId, u64)) -> (LogId, u64) {
    ((shard, writer, (entries >> 32) as u32), entries)
}

impl Checker for Owners {
    fn on_settled(&mut self, _now: Time, node: NodeId, actor: &Actor) -> Result<(), String> {
        let Some(replica) = actor.as_replica() else { return Ok(()) };
        let (process, core) = (replica.process(), replica.core());
        if let Some(id) = replica.copy().and_then(|copy| copy.id()) {
            if let Some(position) = replica.position() {
                self.copies.insert((id, process, core), log(id, position));
            }
            return Ok(());
        }
        let Some(id) = replica.shard().and_then(|shard| shard.id()) else { return Ok(()) };
        if let Some((log, has)) = self.copies.remove(&(id, process, core)) {
            let known = self.ended.entry(log).or_insert(has);
            *known = has.max(*known);
        }
        let Some(position) = replica.position() else { return Ok(()) };
        let (log, applied) = log(id, position);
        let began = *self.began.entry(log).or_insert(applied);
        if let Some(&has) = self.ended.get(&log)
            && applied > has.max(began)
        {
            return Err(format!(
                "{node} has applied {} inputs more to {id}, which was given to another process, than that one has",
                applied - has
            ));
        }
        Ok(())
    }
}
