//! A shard has one owner: a process that it was taken from applies nothing that the next one lacks.

use super::Checker;
use crate::actor::Actor;
use paramill_core::types::{NodeId, ProcessId, ShardId, Time};
use std::collections::BTreeMap;

/// A place in the log of the process that wrote it.
type Position = (ProcessId, u64);

/// Watches shards that are given to other processes.
#[derive(Debug, Default)]
pub struct Owners {
    /// How much each copy has, by its process.
    copies: BTreeMap<(ShardId, ProcessId), Position>,
    /// How much of a process' log was there when another took over from it.
    ended: BTreeMap<(ShardId, ProcessId), u64>,
}

/// Logs begin at a number that no other log of the shard has.
fn is_of_one_log(one: u64, other: u64) -> bool {
    one >> 32 == other >> 32
}

impl Checker for Owners {
    fn on_settled(&mut self, _now: Time, node: NodeId, actor: &Actor) -> Result<(), String> {
        let Some(replica) = actor.as_replica() else { return Ok(()) };
        let own = replica.process();
        if let Some(id) = replica.copy().and_then(|copy| copy.id()) {
            let Some((writer, has)) = replica.position() else { return Ok(()) };
            // A process may have a copy that is over beside the one that counts, which has more, or follows a later log.
            let known = self.copies.entry((id, own)).or_insert((writer, has));
            if has > known.1 {
                *known = (writer, has);
            }
            return Ok(());
        }
        let Some(id) = replica.shard().and_then(|shard| shard.id()) else { return Ok(()) };
        if let Some((writer, has)) = self.copies.remove(&(id, own)) {
            let known = self.ended.entry((id, writer)).or_insert(has);
            *known = has.max(*known);
        }
        let (ended, position) = (self.ended.get(&(id, own)), replica.position());
        if let Some((&has, (_, applied))) = ended.zip(position)
            && is_of_one_log(has, applied)
            && applied > has
        {
            return Err(format!(
                "{node} has applied {} inputs more to {id}, which was given to another process, than that one has",
                applied - has
            ));
        }
        Ok(())
    }
}
