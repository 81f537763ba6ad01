//! Pulls of rows that wait here for a push of the same worker: it reads what it pushed.

use super::members::Caller;
use super::uplink::Peers;
use crate::limits;
use crate::types::WorkerId;
use crate::wire::frame::{FromWorker, Pull};
use crate::wire::{Cause, Fault};

/// A worker pushes rows, and then pulls others of the same table. While its push is held here, the pull would overtake it.
#[derive(Debug, Default)]
pub(super) struct HeldPulls {
    pulls: Vec<HeldPull>,
}

#[derive(Debug)]
struct HeldPull {
    caller: Caller,
    pull: Pull,
    /// Numbers of the rows.
    payload: Vec<u8>,
}

impl HeldPulls {
    /// Holds a pull. Its worker may have as many as on a shard.
    pub(super) fn hold(&mut self, caller: Caller, pull: Pull, payload: &[u8]) -> Result<(), Fault> {
        let worker = caller.worker;
        let is_same = |held: &HeldPull| {
            (held.caller.worker, held.pull.subject.request) == (worker, pull.subject.request)
        };
        self.pulls.retain(|held| !is_same(held));
        let own = || self.pulls.iter().filter(|held| held.caller.worker == worker);
        let rows = own().map(|held| held.payload.len() / 4).sum::<usize>() + payload.len() / 4;
        if own().count() >= limits::MAX_PENDING_PULLS || rows > limits::MAX_PENDING_ROWS {
            let message = format!("{worker} has too many pulls waiting here; wait for them first");
            return Err(Fault { cause: Cause::TooFarAhead, message });
        }
        self.pulls.push(HeldPull { caller, pull, payload: payload.to_vec() });
        Ok(())
    }

    /// Passes on the pulls of a table for which nothing is held any more.
    pub(super) fn release(
        &mut self,
        table: usize,
        is_held: impl Fn(WorkerId) -> bool,
        peers: &mut Peers<'_, '_>,
    ) {
        let is_free =
            |held: &mut HeldPull| held.pull.subject.table.0 as usize == table && !is_held(held.caller.worker);
        for HeldPull { caller, pull, payload } in self.pulls.extract_if(.., is_free) {
            if let Err(fault) = peers.uplink.relay(caller, FromWorker::Pull(pull), &payload, 0, peers.out) {
                peers.refuse(caller, pull.subject.table, pull.subject.request, &fault);
            }
        }
    }

    /// A worker's connection is gone. It asks again.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.pulls.retain(|held| held.caller.worker != worker);
    }

    pub(super) fn clear(&mut self) {
        self.pulls.clear();
    }
}
