//! A table as the application uses it.

use super::error::ClientError;
use super::handle::Handle;
use super::hands::Threads;
use super::packing::Member;
use super::shared::{Shared, lock};
use super::slab::Slab;
use crate::clock;
use paramill_core::lease::Lease;
use paramill_core::table::TableSpec;
use paramill_core::types::TableId;
use paramill_core::wire::DType;
use paramill_core::worker::{Gradient, PullOptions};
use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// What is trained: an array that lives on the servers. Made by [`Job::table`](super::Job::table); clones are the same
/// table. It does not keep its job running.
///
/// Small dense tables may travel together: see [`Job::table`](super::Job::table).
///
/// A gradient is a slice, or a [`Gradient`] where it is of single rows or a product of thin matrices.
#[derive(Debug, Clone)]
pub struct Table(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    id: TableId,
    spec: TableSpec,
    /// Where it is in the worker, once the job starts.
    place: OnceLock<Place>,
    /// Updates whose end nobody has seen yet, oldest first.
    updates: Mutex<Vec<Handle>>,
}

/// Where a table is in the worker.
#[derive(Debug)]
pub(super) enum Place {
    /// It is one of the worker's tables.
    Own(TableId),
    /// It is a layer of one.
    Layer(Member),
}

/// A dense table's parameters ([`Table::values`]).
#[derive(Debug, Clone)]
pub struct Values {
    lease: Lease,
    range: Range<usize>,
}

impl Deref for Values {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.lease.as_slice()[self.range.clone()]
    }
}

impl Table {
    pub(super) fn new(shared: Arc<Shared>, id: TableId, spec: TableSpec) -> Table {
        let (place, updates) = (OnceLock::new(), Mutex::default());
        Table(Arc::new(Inner { shared, id, spec, place, updates }))
    }

    /// The job starts: this is where it is from now on.
    pub(super) fn settle(&self, place: Place) {
        // A job starts once.
        let _ = self.0.place.set(place);
    }

    /// The pack that it is a layer of, if it is one.
    fn member(&self) -> Option<&Member> {
        match self.0.place.get() {
            Some(Place::Layer(member)) => Some(member),
            _ => None,
        }
    }

    /// The worker's table that it is, or is a layer of.
    fn home(&self) -> TableId {
        match self.0.place.get() {
            Some(Place::Own(id)) => *id,
            Some(Place::Layer(member)) => member.table(),
            None => self.0.id,
        }
    }

    /// Its elements in that table.
    fn range(&self) -> Range<usize> {
        self.member().map_or_else(|| 0..self.0.spec.elements() as usize, Member::range)
    }

    /// Its number in the job.
    pub fn id(&self) -> TableId {
        self.0.id
    }

    /// What it was created as.
    pub fn spec(&self) -> &TableSpec {
        &self.0.spec
    }

    /// Sends a gradient of the current clock and asks for the parameters that follow it. [`Table::sync`] waits for them.
    ///
    /// Whatever the error, this gradient was not sent, and other workers may wait for it. [`ClientError::EarlierUpdate`]
    /// says that nothing is wrong with it: an update that was sent before failed, and the next call sends this one.
    pub fn update<'g>(&self, gradient: impl Into<Gradient<'g>>) -> Result<(), ClientError> {
        let mut pending = lock(&self.0.updates);
        while let Some(handle) = pending.first()
            && handle.is_over()
        {
            let handle = pending.remove(0);
            let outcome = handle.wait_within(Duration::ZERO);
            outcome.map_err(|error| ClientError::EarlierUpdate(Box::new(error)))?;
        }
        pending.push(self.push_pull(gradient)?);
        Ok(())
    }

    /// Waits until the parameters may be used for the next iteration. After a time-out it may be called again, to wait on.
    /// The error of an update is given once; those after it are waited for by the next call.
    ///
    /// Under `ssp`, `dsps` and `pssp` it returns at once as long as the copy that is here is within the model's bound, while updates
    /// and newer parameters travel. An update that fails meanwhile is told by a later call, or by
    /// [`Job::close`](super::Job::close); at a barrier, servers have all of them.
    pub fn sync(&self) -> Result<(), ClientError> {
        self.sync_within(self.0.shared.timeout)
    }

    /// [`Table::sync`] with a time-out of its own, which holds for each update that is waited for.
    pub fn sync_within(&self, timeout: Duration) -> Result<(), ClientError> {
        let mut pending = std::mem::take(&mut *lock(&self.0.updates));
        while let Some(handle) = pending.first() {
            let outcome = handle.wait_within(timeout);
            // The error of an earlier update is told while one is waited for that is well.
            let is_open =
                matches!(outcome, Err(ClientError::Timeout { .. })) || outcome.is_err() && !handle.is_over();
            if !is_open {
                drop(pending.remove(0));
            }
            if outcome.is_err() {
                lock(&self.0.updates).splice(0..0, pending);
                return outcome;
            }
        }
        Ok(())
    }

    /// Sends a gradient; the handle is due when all servers have it.
    pub fn push<'g>(&self, gradient: impl Into<Gradient<'g>>) -> Result<Handle, ClientError> {
        self.send(gradient.into(), false)
    }

    /// Sends a gradient and asks for the parameters that follow it, in one round.
    pub fn push_pull<'g>(&self, gradient: impl Into<Gradient<'g>>) -> Result<Handle, ClientError> {
        self.send(gradient.into(), true)
    }

    /// The worker is not held while the gradient is copied or encoded.
    fn send(&self, gradient: Gradient<'_>, want: bool) -> Result<Handle, ClientError> {
        if let Some(member) = self.member() {
            return Ok(Handle::packed(member.send(gradient, want)?, |_, _| Ok(())));
        }
        let (shared, id) = (&self.0.shared, self.home());
        let mut submission = shared.act(|worker| worker.begin_push(id, gradient, Vec::new(), want))?;
        submission.prepare(&Threads::of_one_job());
        let ticket = shared.act(|worker| worker.finish(clock::now(), &mut submission))?;
        Ok(Handle::new(shared.clone(), ticket))
    }

    /// Asks for a dense table's parameters; read them with [`Table::read`] when the handle is due.
    pub fn pull(&self) -> Result<Handle, ClientError> {
        if let Some(member) = self.member() {
            return Ok(Handle::packed(member.pull(false)?, |_, _| Ok(())));
        }
        let id = self.home();
        let ticket = self.0.shared.act(|worker| worker.pull(clock::now(), id, PullOptions::default()))?;
        Ok(Handle::new(self.0.shared.clone(), ticket))
    }

    /// Asks for everything that is there now, whatever the consistency model; for evaluation. The handle brings a copy of
    /// it.
    pub fn pull_now(&self) -> Result<Handle<Vec<f32>>, ClientError> {
        let options = PullOptions { rows: None, now: true };
        let (id, is_sparse, range) = (self.home(), self.0.spec.rows, self.range());
        let copy = move |shared: &Arc<Shared>, _| {
            let values = shared.lock().worker.shared_values(id)?;
            Ok(values.as_slice()[range.clone()].to_vec())
        };
        if let Some(member) = self.member() {
            return Ok(Handle::packed(member.pull(true)?, copy));
        }
        let ticket = self.0.shared.act(|worker| worker.pull(clock::now(), id, options))?;
        Ok(Handle::bringing(self.0.shared.clone(), ticket, move |shared, ticket| {
            if is_sparse {
                return Ok(shared.lock().worker.redeem(ticket));
            }
            copy(shared, ticket)
        }))
    }

    /// Asks for single rows of a sparse table, strictly ascending; the handle brings them, one after the other.
    pub fn rows(&self, rows: &[u32]) -> Result<Handle<Vec<f32>>, ClientError> {
        let (id, options) = (self.home(), PullOptions { rows: Some(rows), now: false });
        let ticket = self.0.shared.act(|worker| worker.pull(clock::now(), id, options))?;
        Ok(Handle::bringing(self.0.shared.clone(), ticket, |shared, ticket| {
            Ok(shared.lock().worker.redeem(ticket))
        }))
    }

    /// A dense table's parameters as last pulled. They do not change, and their memory is not used again, as long as they are
    /// held.
    pub fn values(&self) -> Result<Values, ClientError> {
        let lease = self.0.shared.lock().worker.shared_values(self.home())?;
        Ok(Values { lease, range: self.range() })
    }

    /// Calls `look` with a dense table's parameters as last pulled. They do not change while it looks.
    pub fn read<T>(&self, look: impl FnOnce(&[f32]) -> T) -> Result<T, ClientError> {
        // The lock is let go first: computing may take long, and the worker must go on meanwhile.
        let values = self.values()?;
        Ok(look(&values))
    }

    /// Lends a dense table's gradient and parameters to the application, to be exchanged without being copied
    /// ([`Job::exchange`](super::Job::exchange)). Under psp with b below 1 an exchange may end before all
    /// parameters are here: the others stay as they are.
    /// One of several small tables that travel together is not lent.
    pub fn slab(&self) -> Result<Slab, ClientError> {
        self.member().map_or(Ok(()), Member::refuse_loan)?;
        Slab::lend(&self.0.shared, self.home())
    }

    /// The elements of the table in the order in which its parameters come to a slab, cut into so many parts: the first one comes
    /// first ([`Handle::has_share_within`]).
    pub fn answer_parts(&self, of: usize) -> Result<Vec<Vec<Range<usize>>>, ClientError> {
        self.0.shared.act(|worker| worker.answer_parts(self.home(), of))
    }

    /// The type that its parameters come as; none where the answer codec makes something else of them.
    pub fn answer_type(&self) -> Result<Option<DType>, ClientError> {
        self.0.shared.act(|worker| worker.answer_type(self.home()))
    }

    /// The codec that its gradients travel by; empty without one.
    pub fn codec(&self) -> Result<String, ClientError> {
        Ok(self.0.shared.lock().worker.codec(self.home())?)
    }
}
