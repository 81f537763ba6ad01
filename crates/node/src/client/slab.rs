//! Buffers of a table that an application and its job hand to each other, so that nothing is copied.

use super::error::ClientError;
use super::handle::Handle;
use super::job::Job;
use super::shared::Shared;
use crate::clock;
use paramill_core::types::TableId;
use paramill_core::worker;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

/// A dense table's gradient and parameters ([`worker::Slab`]), lent by a [`Job`]. Dropping it ends the loan: the table is
/// then pushed and pulled as others are.
#[derive(Debug)]
pub struct Slab {
    /// Gone once an exchange, or the job, has it.
    slab: Option<worker::Slab>,
    shared: Arc<Shared>,
}

/// Slabs under way. Dropping it does not undo anything: the tables are then pushed and pulled as others are.
#[derive(Debug)]
#[must_use = "an exchange tells whether it succeeded, and has the slabs"]
pub struct Exchange {
    handle: Handle,
}

impl Job {
    /// Lends a dense table's gradient and parameters to the application, to be exchanged without being copied. An
    /// exchange waits for all blocks: under psp with b below 1 this is refused.
    pub fn slab(&self, table: TableId) -> Result<Slab, ClientError> {
        let mut state = self.shared.lock();
        let slab = state.worker.slab(table)?;
        // The coordinator is told.
        self.shared.let_go(state);
        Ok(Slab { slab: Some(slab), shared: self.shared.clone() })
    }

    /// Ends a loan, as dropping the slab does.
    pub fn give_back(&self, slab: Slab) {
        drop(slab);
    }

    /// Sends the gradients of these slabs and asks for the parameters that follow them, all in one round. The slabs
    /// are taken, and come back with [`Exchange::wait`]; on an error they stay, and nothing was sent. NaN and Inf are
    /// found by the servers, not here. A slab that another job lent is refused.
    pub fn exchange(&self, slabs: &mut Vec<Slab>) -> Result<Exchange, ClientError> {
        let mut lent: Vec<worker::Slab> = slabs.iter_mut().filter_map(|slab| slab.slab.take()).collect();
        match self.act(|worker| worker.exchange(clock::now(), &mut lent)) {
            Ok(handle) => {
                slabs.clear();
                Ok(Exchange { handle })
            }
            Err(error) => {
                slabs.iter_mut().zip(lent).for_each(|(slab, lent)| slab.slab = Some(lent));
                Err(error)
            }
        }
    }
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

impl Exchange {
    /// Waits until all parameters are here. After a time-out it may be called again, to wait on; after another error
    /// [`Exchange::give_up`] has the slabs.
    pub fn wait(&mut self, timeout: Duration) -> Result<Vec<Slab>, ClientError> {
        self.handle.wait(timeout)?;
        Ok(self.redeem())
    }

    /// Whether [`Exchange::wait`] would return at once, after waiting a while for that.
    pub fn is_due_within(&self, timeout: Duration) -> bool {
        self.handle.is_due_within(timeout)
    }

    /// Gives up: the slabs as they are.
    pub fn give_up(&mut self) -> Vec<Slab> {
        self.redeem()
    }

    fn redeem(&mut self) -> Vec<Slab> {
        let Handle { shared, ticket } = &self.handle;
        let lent = shared.lock_landed(*ticket).worker.redeem_slabs(*ticket);
        lent.into_iter().map(|slab| Slab { slab: Some(slab), shared: shared.clone() }).collect()
    }
}
