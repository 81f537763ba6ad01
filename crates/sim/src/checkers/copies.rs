//! A copy of a shard is the shard: after the same inputs both have the same image.

use super::Checker;
use crate::actor::Actor;
use paramill_core::types::{NodeId, ProcessId, ShardId, Time};
use std::collections::BTreeMap;
use xxhash_rust::xxh3::xxh3_64;

/// Positions in a log that are remembered: a copy is ahead of the process that serves the shard by what is on its way.
const REMEMBERED: usize = 4096;

/// Compares shards with their copies.
#[derive(Debug, Default)]
pub struct Copies {
    /// Digests of images by shard, the process that wrote the log, and the place in it.
    digests: BTreeMap<(ShardId, ProcessId, u64), u64>,
}

impl Checker for Copies {
    fn on_settled(&mut self, _now: Time, node: NodeId, actor: &Actor) -> Result<(), String> {
        let Some(replica) = actor.as_replica() else { return Ok(()) };
        let (Some(shard), Some((writer, number))) = (replica.shard().or(replica.copy()), replica.position())
        else {
            return Ok(());
        };
        let Some(id) = shard.id() else { return Ok(()) };
        let digest = xxh3_64(&shard.image().encode());
        if self.digests.len() > REMEMBERED {
            self.digests.pop_first();
        }
        let known = *self.digests.entry((id, writer, number)).or_insert(digest);
        if known != digest {
            return Err(format!(
                "{node} has another {id} after {number} inputs than others that had the same"
            ));
        }
        Ok(())
    }
}
