//! No update is held back for longer than its bound.
//!
//! A push of a dense table all of whose chunks lack a gradient is one that is held back. The gradients of such pushes, from the first
//! on, have to be in a push that has some before the bound is over.

use super::Checker;
use super::layout::Layout;
use super::policies::held_at_most;
use crate::actor::Actor;
use crate::cluster::Cluster;
use crate::rule::FrameView;
use crate::scenario::ScenarioError;
use paramill_core::types::{Clock, NodeId, TableId, WorkerId};
use paramill_core::wire::{Flags, Kind};
use std::collections::{BTreeMap, BTreeSet};

/// Follows the pushes of every worker.
#[derive(Debug)]
pub struct Held {
    layout: Layout,
    most: u64,
    /// By worker, its process and table.
    pushes: BTreeMap<(WorkerId, u64, TableId), Pushes>,
}

#[derive(Debug, Default)]
struct Pushes {
    /// The last iteration of which a gradient was sent.
    sent: Option<Clock>,
    /// Iterations after it whose gradients are held back.
    held: BTreeSet<Clock>,
}

impl Held {
    /// For a job whose workers hold updates back; `None` where none does.
    pub fn new(cluster: &Cluster) -> Result<Option<Held>, ScenarioError> {
        let most = held_at_most(cluster.scenario())?;
        let layout = Layout::new(cluster.scenario())?;
        Ok(most.map(|most| Held { layout, most, pushes: BTreeMap::new() }))
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
        let (clock, table) = (header.clock, header.table);
        if self.layout.table(table).rows {
            return Ok(());
        }
        let pushes = self.pushes.entry((worker, player.life(), table)).or_default();
        // A list of absent ranges, and nothing behind it. A push without anything is one that the server would drop.
        let is_held = flags.has(Flags::ABSENT) && !flags.has(Flags::ENCODED) && frame.payload.len() <= 64;
        if !is_held {
            pushes.sent = pushes.sent.max(Some(clock));
            pushes.held.retain(|held| *held > clock);
            return Ok(());
        }
        // One that is sent again may be of an earlier iteration.
        if pushes.sent < Some(clock) {
            pushes.held.insert(clock);
            if pushes.held.len() as u64 > self.most {
                return Err(format!(
                    "{worker} holds gradients of {} pushes of table {} back at clock {clock}; at most {} are allowed",
                    pushes.held.len(),
                    table.0,
                    self.most
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
                    "{worker} has held a gradient back from {longest} pushes; at most {} are allowed",
                    self.most
                ));
            }
        }
        Ok(())
    }
}
