//! No update is held back for longer than its bound.
//!
//! A push of a dense table all of whose chunks lack a gradient is one that is held back. The gradients of such pushes, from the first
//! on, have to be in a push that has some before the bound is over.

use super::Checker;
use super::policies::held_at_most;
use crate::actor::Actor;
use crate::cluster::Cluster;
use crate::rule::FrameView;
use crate::scenario::ScenarioError;
use paramill_core::types::{Clock, NodeId, TableId, WorkerId};
use paramill_core::wire::{Flags, Kind};
use std::collections::BTreeMap;

/// Follows the pushes of every worker.
#[derive(Debug)]
pub struct Held {
    most: u64,
    /// By worker, its process and table.
    pushes: BTreeMap<(WorkerId, u64, TableId), Pushes>,
}

#[derive(Debug, Default)]
struct Pushes {
    /// The last iteration of which a gradient was sent.
    sent: Option<Clock>,
    /// The first iteration after it whose gradient is held back.
    since: Option<Clock>,
}

impl Held {
    /// For a job whose workers hold updates back; `None` where none does.
    pub fn new(cluster: &Cluster) -> Result<Option<Held>, ScenarioError> {
        let most = held_at_most(cluster.scenario())?;
        Ok(most.map(|most| Held { most, pushes: BTreeMap::new() }))
    }
}

impl Checker for Held {
    fn on_sent(&mut self, frame: &FrameView<'_>, sender: &Actor) -> Result<(), String> {
        let (header, flags) = (frame.header, frame.header.flags);
        let (NodeId::Worker(worker), Kind::Push, Some(player)) =
            (frame.from, header.kind, sender.as_player())
        else {
            return Ok(());
        };
        if flags.has(Flags::ROWS) {
            return Ok(());
        }
        let (clock, table) = (header.clock, header.table);
        let pushes = self.pushes.entry((worker, player.life(), table)).or_default();
        // A list of absent ranges, and nothing behind it.
        let is_held = flags.has(Flags::ABSENT) && !flags.has(Flags::ENCODED) && frame.payload.len() <= 64;
        if !is_held {
            pushes.sent = pushes.sent.max(Some(clock));
            pushes.since = pushes.since.filter(|since| *since > clock);
            return Ok(());
        }
        // One that is sent again may be of an earlier iteration.
        if pushes.sent < Some(clock) {
            let since = pushes.since.map_or(clock, |since| since.min(clock));
            pushes.since = Some(since);
            if clock - since >= self.most {
                return Err(format!(
                    "{worker} holds its gradient of clock {since} of table {} back at clock {clock}; at most {} iterations are allowed",
                    table.0, self.most
                ));
            }
        }
        Ok(())
    }

    fn at_end(&mut self, cluster: &Cluster) -> Result<(), String> {
        for worker in cluster.worker_ids() {
            let updates = cluster.player(worker).worker().report().updates;
            if let Some(updates) = updates.filter(|updates| updates.longest > self.most) {
                let longest = updates.longest;
                return Err(format!(
                    "{worker} has held a gradient back for {longest} iterations; at most {} are allowed",
                    self.most
                ));
            }
        }
        Ok(())
    }
}
