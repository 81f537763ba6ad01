//! Buffers of a table that an application and its job hand to each other, so that nothing is copied.

use super::error::ClientError;
use super::handle::Handle;
use super::hands::Threads;
use super::job::Job;
use super::shared::Shared;
use crate::clock;
use paramill_core::types::TableId;
use paramill_core::worker::{self, Share, Ticket};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

/// A dense table's gradient and parameters ([`worker::Slab`]), lent by [`Table::slab`](super::Table::slab). Dropping it ends the loan: the table is
/// then pushed and pulled as others are.
#[derive(Debug)]
pub struct Slab {
    /// Gone once an exchange, or the job, has it.
    slab: Option<worker::Slab>,
    shared: Arc<Shared>,
}

impl Slab {
    pub(super) fn lend(shared: &Arc<Shared>, table: TableId) -> Result<Slab, ClientError> {
        // The coordinator is told.
        let slab = shared.act(|worker| worker.slab(table))?;
        Ok(Slab { slab: Some(slab), shared: shared.clone() })
    }
}

impl Job {
    /// Sends the gradients of these slabs and asks for the parameters that follow them, all in one round. The slabs
    /// are taken, and come back with [`Handle::wait`]; on an error they stay, and nothing was sent. NaN and Inf are
    /// found by the servers, not here. A slab that another job lent is refused.
    ///
    /// Dropping the handle does not undo anything: the tables are then pushed and pulled as others are.
    pub fn exchange(&self, slabs: &mut Vec<Slab>) -> Result<Handle<Vec<Slab>>, ClientError> {
        let mut lent: Vec<worker::Slab> = slabs.iter_mut().filter_map(|slab| slab.slab.take()).collect();
        match self.exchange_lent(&mut lent) {
            Ok(ticket) => {
                slabs.clear();
                Ok(Handle::bringing(self.shared.clone(), ticket, |shared, ticket| Ok(redeem(shared, ticket))))
            }
            Err(error) => {
                slabs.iter_mut().zip(lent).for_each(|(slab, lent)| slab.slab = Some(lent));
                Err(error)
            }
        }
    }

    /// The worker is not held while gradients are copied or encoded. After an error the slabs are where they were.
    fn exchange_lent(&self, lent: &mut Vec<worker::Slab>) -> Result<Ticket, ClientError> {
        let mut submission = self.shared.act(|worker| worker.begin_exchange(lent))?;
        submission.prepare(&Threads::of_one_job());
        let finished = self.shared.act(|worker| worker.finish(clock::now(), &mut submission));
        if finished.is_err() {
            *lent = submission.take_slabs();
        }
        finished
    }
}

impl Handle<Vec<Slab>> {
    /// Waits a while for a share of the parameters ([`Table::answer_parts`](super::Table::answer_parts)): whether it is in the slabs, or
    /// [`Handle::wait`] would return at once. It may be read there; newer ones may follow after a connection was lost, where the
    /// consistency model lets there be newer ones.
    pub fn has_share_within(&self, share: Share, timeout: Duration) -> bool {
        self.ticket().map_or(true, |ticket| self.shared.has_share_within(ticket, share, timeout))
    }

    /// Gives up, after an error that is not a time-out: the slabs as they are.
    pub fn give_up(&self) -> Vec<Slab> {
        self.ticket().map(|ticket| redeem(&self.shared, ticket)).unwrap_or_default()
    }
}

fn redeem(shared: &Arc<Shared>, ticket: Ticket) -> Vec<Slab> {
    let lent = shared.lock_landed(ticket).worker.redeem_slabs(ticket);
    lent.into_iter().map(|slab| Slab { slab: Some(slab), shared: shared.clone() }).collect()
}

impl Deref for Slab {
    type Target = worker::Slab;

    fn deref(&self) -> &worker::Slab {
        self.slab.as_ref().expect("only a slab that was taken is without")
    }
}

impl DerefMut for Slab {
    fn deref_mut(&mut self) -> &mut worker::Slab {
        self.slab.as_mut().expect("only a slab that was taken is without")
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // After a panic in the worker's thread nobody uses the table any more.
        if let Some(slab) = self.slab.take()
            && let Ok(mut state) = self.shared.state.lock()
        {
            // Only a slab that was swapped for one of another job is refused; nobody can return that one.
            let _ = state.worker.give_back(slab);
        }
    }
}
