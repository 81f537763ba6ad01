//! A table's gradient and parameters in memory that the data plane sends from and receives into.

#![allow(unsafe_code, reason = "arrays look into buffers; see `Slab::address`")]

use crate::arrays;
use crate::errors::{client, raise};
use crate::waiting::{check_process, duration, timed, until_due};
use numpy::PyArray1;
use paramill_node::client::{self as node, ClientError, DType, Prepared, WorkerError};
use pyo3::prelude::*;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// A table's buffers, lent to Python.
///
/// Its arrays stay valid as long as it lives, whatever happens to the job: the buffers are in `place`, or in the exchange
/// that is in `place`, or, where an exchange that failed gave back others, in the worker, which `table` keeps.
#[pyclass(frozen, module = "paramill._native")]
pub(crate) struct Slab {
    table: node::Table,
    process: u32,
    place: Mutex<Place>,
}

/// Where the buffers are.
enum Place {
    Here {
        slab: node::Slab,
        moves: u64,
    },
    /// Under way in an exchange that is kept here, at this address.
    Away {
        _kept: Arc<Underway>,
        address: Address,
        moves: u64,
    },
    /// Only while it goes from one of these to the other.
    Between,
}

/// Where the elements are, and how many.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Address {
    pub(crate) gradient: *const f32,
    pub(crate) values: *const f32,
    pub(crate) len: usize,
}

// SAFETY: the pointers are turned into arrays, which is done while the interpreter is held, or handed to a device while no
// exchange has the buffers.
unsafe impl Send for Address {}

impl Address {
    fn of(slab: &mut node::Slab) -> Address {
        Address {
            gradient: slab.gradient_mut().as_ptr(),
            values: slab.values_mut().as_ptr(),
            len: slab.gradient().len(),
        }
    }
}

#[pymethods]
impl Slab {
    /// The gradient that the next exchange sends.
    fn gradient<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let Address { gradient, len, .. } = this.get().address()?;
        // SAFETY: what is at an address stays there as long as the slab does (see `Slab`).
        Ok(unsafe { arrays::view(gradient, len, this.clone().into_any()) })
    }

    /// The parameters that the last exchange brought.
    fn values<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let Address { values, len, .. } = this.get().address()?;
        // SAFETY: as above.
        Ok(unsafe { arrays::view(values, len, this.clone().into_any()) })
    }

    /// The type of the parameters that the last exchange brought: `f32`, `f16` or `bf16`.
    fn values_type(&self) -> PyResult<&'static str> {
        let found = self.here(|slab| Ok(slab.values_type())).map_err(client)?;
        Ok(match found {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
        })
    }

    /// The codec that the gradient travels by; empty without one.
    fn codec(&self) -> PyResult<String> {
        self.table.codec().map_err(client)
    }

    /// Says what stands in the gradient's memory for the next exchange: `chosen` entries, `count` `places` and values, or
    /// `halves`, by a codec that may have changed since.
    fn contains(&self, content: &str, count: usize, codec: String) -> PyResult<()> {
        let prepared = match content {
            "chosen" => Prepared::Chosen,
            "places" => Prepared::Places { count },
            "halves" => Prepared::Halves,
            other => return Err(raise("OrderError", format!("there is no content `{other}`"))),
        };
        self.prepare(prepared, codec).map_err(client)
    }

    /// Says of which elements there is no gradient in the next exchange: ascending ranges, from the first element of each to
    /// the one after its last.
    fn lacks(&self, ranges: Vec<(usize, usize)>) -> PyResult<()> {
        self.leave_out(ranges).map_err(client)
    }

    /// How often the buffers moved: arrays that were made before look at memory that is not used any more.
    fn moves(&self) -> u64 {
        match *self.lock() {
            Place::Here { moves, .. } | Place::Away { moves, .. } => moves,
            Place::Between => 0,
        }
    }
}

impl Slab {
    pub(crate) fn new(table: node::Table) -> PyResult<Slab> {
        let slab = table.slab().map_err(client)?;
        let place = Mutex::new(Place::Here { slab, moves: 0 });
        Ok(Slab { table, process: std::process::id(), place })
    }

    fn lock(&self) -> MutexGuard<'_, Place> {
        self.place.lock().expect("no holder of this lock panics")
    }

    /// Where the elements are now.
    pub(crate) fn address(&self) -> PyResult<Address> {
        match &mut *self.lock() {
            Place::Here { slab, .. } => Ok(Address::of(slab)),
            Place::Away { address, .. } => Ok(*address),
            Place::Between => Err(raise("OrderError", "this slab is being exchanged by another thread")),
        }
    }

    /// The elements of the parameters in the order in which they come, cut into so many parts.
    pub(crate) fn answer_parts(&self, of: usize) -> Result<Vec<Vec<Range<usize>>>, ClientError> {
        self.table.answer_parts(of)
    }

    /// The type that parameters come as, where no codec encodes them otherwise.
    pub(crate) fn answer_type(&self) -> Result<Option<DType>, ClientError> {
        self.table.answer_type()
    }

    /// Says whether parameters may come as halves, which are then at the beginning of the memory of `values`.
    pub(crate) fn ask_halves(&self, takes: bool) -> Result<(), ClientError> {
        self.here(|slab| {
            slab.take_halves(takes);
            if !takes {
                slab.convert_values(DType::F32);
            }
            Ok(())
        })
    }

    /// Says what stands in the gradient's memory, by the codec of this text.
    pub(crate) fn prepare(&self, prepared: Prepared, codec: String) -> Result<(), ClientError> {
        self.here(|slab| {
            slab.contains_by(prepared, codec);
            Ok(())
        })
    }

    /// Says of which elements there is no gradient.
    pub(crate) fn leave_out(&self, ranges: Vec<(usize, usize)>) -> Result<(), ClientError> {
        let ranges = ranges.into_iter().map(|(start, end)| start..end).collect();
        self.here(|slab| Ok(slab.lacks(ranges)?))
    }

    /// Makes the gradient zero.
    pub(crate) fn clear(&self) -> Result<(), ClientError> {
        self.here(|slab| {
            slab.gradient_mut().fill(0.0);
            Ok(())
        })
    }

    /// Looks at the buffers, which must not be under way.
    fn here<T>(
        &self,
        visit: impl FnOnce(&mut node::Slab) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        match &mut *self.lock() {
            Place::Here { slab, .. } => visit(slab),
            Place::Away { .. } | Place::Between => Err(under_way()),
        }
    }

    /// Takes the buffers for an exchange.
    fn send(&self) -> Result<(node::Slab, u64), ClientError> {
        let mut place = self.lock();
        match std::mem::replace(&mut *place, Place::Between) {
            Place::Here { slab, moves } => Ok((slab, moves)),
            other => {
                *place = other;
                Err(under_way())
            }
        }
    }

    /// Puts buffers back that an exchange returned.
    pub(crate) fn put_back(&self, mut slab: node::Slab) {
        let mut place = self.lock();
        let moves = match &*place {
            Place::Away { address, moves, .. } => moves + u64::from(*address != Address::of(&mut slab)),
            Place::Here { moves, .. } => *moves,
            Place::Between => 0,
        };
        *place = Place::Here { slab, moves };
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        let place = self.place.get_mut().expect("no holder of this lock panics");
        match std::mem::replace(place, Place::Between) {
            // In a forked child the worker's lock may be held by a thread that is not there.
            other if std::process::id() != self.process => std::mem::forget(other),
            // Dropped, the buffers go back to their job.
            Place::Here { .. } | Place::Away { .. } | Place::Between => {}
        }
    }
}

/// Slabs while an exchange has them.
pub(crate) type Underway = node::Handle<Vec<node::Slab>>;

/// Slabs under way together.
#[pyclass(frozen, module = "paramill._native")]
pub(crate) struct Exchange {
    exchange: Arc<Underway>,
    process: u32,
    timeout: Duration,
    slabs: Vec<Py<Slab>>,
}

/// Sends the gradients of these slabs; all of them or, on an error, none.
pub(crate) fn exchange(py: Python<'_>, job: &node::Job, slabs: Vec<Py<Slab>>) -> PyResult<Exchange> {
    let all: Vec<&Slab> = slabs.iter().map(Py::get).collect();
    let exchange = py.detach(|| begin(job, &all)).map_err(client)?;
    Ok(Exchange { exchange, process: std::process::id(), timeout: job.timeout(), slabs })
}

/// The same without the interpreter. The slabs are put back with [`Slab::put_back`].
pub(crate) fn begin(job: &node::Job, slabs: &[&Slab]) -> Result<Arc<Underway>, ClientError> {
    let mut taken = Vec::with_capacity(slabs.len());
    let mut moves = Vec::with_capacity(slabs.len());
    for slab in slabs {
        match slab.send() {
            Ok((buffers, count)) => {
                taken.push(buffers);
                moves.push(count);
            }
            Err(error) => {
                restore(slabs, taken);
                return Err(error);
            }
        }
    }
    let addresses: Vec<Address> = taken.iter_mut().map(Address::of).collect();
    let exchange = match job.exchange(&mut taken) {
        Ok(exchange) => Arc::new(exchange),
        Err(error) => {
            restore(slabs, taken);
            return Err(error);
        }
    };
    for ((slab, address), moves) in slabs.iter().zip(addresses).zip(moves) {
        *slab.lock() = Place::Away { _kept: exchange.clone(), address, moves };
    }
    Ok(exchange)
}

/// Puts buffers back, which are in the order of their slabs: by number, tables of different jobs would be mixed up.
fn restore(slabs: &[&Slab], taken: Vec<node::Slab>) {
    for (slab, buffers) in slabs.iter().zip(taken) {
        slab.put_back(buffers);
    }
}

fn under_way() -> ClientError {
    WorkerError::Order("a slab is under way: wait for its exchange first".to_owned()).into()
}

#[pymethods]
impl Exchange {
    /// Waits until all parameters are here. After a time-out it may be called again.
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        check_process(self.process)?;
        let timeout = timeout.map(duration).transpose()?.unwrap_or(self.timeout);
        until_due(py, timeout, |slice| Ok(self.exchange.is_due_within(slice)))?;
        let (slabs, outcome) = py.detach(|| match self.exchange.wait_within(Duration::ZERO) {
            Ok(slabs) => (slabs, Ok(())),
            Err(error @ node::ClientError::Timeout { .. }) => (Vec::new(), Err(error)),
            Err(error) => (self.exchange.give_up(), Err(error)),
        });
        let own: Vec<&Slab> = self.slabs.iter().map(Py::get).collect();
        restore(&own, slabs);
        outcome.map_err(|error| client(timed(error, timeout)))
    }

    /// Whether `wait` would return at once.
    fn is_due(&self, py: Python<'_>) -> PyResult<bool> {
        check_process(self.process)?;
        Ok(py.detach(|| self.exchange.is_due()))
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // One owner more than there is: it stays, as a slab does in a forked child.
            std::mem::forget(self.exchange.clone());
        }
    }
}
