//! A table as Python uses it.

#![allow(unsafe_code, reason = "arrays look into buffers; see `Table::values`")]

use crate::arrays;
use crate::errors::{client, raise};
use crate::handle::Handle;
use crate::job::Membership;
use crate::slab::Slab;
use numpy::{PyArray1, PyArrayMethods, PyReadonlyArray1, PyReadonlyArrayDyn, PyReadwriteArrayDyn};
use paramill_node::client::{self as node, Factors, Gradient};
use pyo3::prelude::*;
use std::sync::Arc;

/// The two matrices of a gradient that is their product.
type Matrices<'py> = (PyReadonlyArrayDyn<'py, f32>, PyReadonlyArrayDyn<'py, f32>);

/// A table of a job.
#[pyclass(frozen, module = "paramill._native")]
pub(crate) struct Table {
    table: node::Table,
    membership: Arc<Membership>,
}

#[pymethods]
impl Table {
    /// Sends a gradient, with the matrices whose product it is; with `want` asks for the parameters that follow it.
    #[pyo3(signature = (gradient, *, factors, want))]
    fn push(
        &self,
        py: Python<'_>,
        gradient: PyReadonlyArrayDyn<'_, f32>,
        factors: Option<Matrices<'_>>,
        want: bool,
    ) -> PyResult<Handle> {
        self.membership.job()?;
        let values = arrays::elements(&gradient)?;
        let factors = factors.as_ref().map(|matrices| self.factors(matrices)).transpose()?;
        let gradient = match factors {
            Some(factors) => Gradient::Product { values, factors },
            None => Gradient::Dense(values),
        };
        let send = || if want { self.table.push_pull(gradient) } else { self.table.push(gradient) };
        self.handle(py.detach(send))
    }

    /// Sends the gradients of single rows of a sparse table.
    fn push_rows(
        &self,
        py: Python<'_>,
        rows: PyReadonlyArray1<'_, u32>,
        values: PyReadonlyArrayDyn<'_, f32>,
    ) -> PyResult<Handle> {
        self.membership.job()?;
        let gradient = Gradient::Rows { rows: numbers(&rows)?, values: arrays::elements(&values)? };
        self.handle(py.detach(|| self.table.push(gradient)))
    }

    /// Asks for the parameters of a dense table.
    fn pull(&self, py: Python<'_>) -> PyResult<Handle> {
        self.membership.job()?;
        self.handle(py.detach(|| self.table.pull()))
    }

    /// Asks for what is there, whatever the consistency model; the handle brings it.
    fn pull_now(&self, py: Python<'_>) -> PyResult<Handle> {
        self.membership.job()?;
        self.handle(py.detach(|| self.table.pull_now()))
    }

    /// Asks for single rows of a sparse table; the handle brings them.
    fn rows(&self, py: Python<'_>, rows: PyReadonlyArray1<'_, u32>) -> PyResult<Handle> {
        self.membership.job()?;
        let rows = numbers(&rows)?;
        self.handle(py.detach(|| self.table.rows(rows)))
    }

    /// A dense table's parameters as last pulled, without copying them.
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        self.membership.job()?;
        let values = self.table.values().map_err(client)?;
        let (start, len) = (values.as_ptr(), values.len());
        let owner = Bound::new(py, Values { _kept: values })?.into_any();
        // SAFETY: the owner keeps the buffer, and a buffer that somebody keeps is not changed.
        let array = unsafe { arrays::view(start, len, owner) };
        array.readwrite().make_nonwriteable();
        Ok(array)
    }

    /// Copies a dense table's parameters as last pulled.
    fn read_into(&self, py: Python<'_>, mut out: PyReadwriteArrayDyn<'_, f32>) -> PyResult<()> {
        self.membership.job()?;
        let out = arrays::elements_mut(&mut out)?;
        let outcome = py.detach(|| {
            self.table.read(|values| {
                let lengths = (values.len(), out.len());
                if lengths.0 == lengths.1 {
                    out.copy_from_slice(values);
                }
                lengths
            })
        });
        match outcome.map_err(client)? {
            (expected, found) if expected == found => Ok(()),
            (expected, found) => {
                Err(raise("ShapeError", format!("expected `out` of {expected} elements, got {found}")))
            }
        }
    }

    /// Lends a dense table's buffers.
    fn slab(&self) -> PyResult<Slab> {
        self.membership.job()?;
        Slab::new(self.table.clone())
    }
}

impl Table {
    pub(crate) fn new(table: node::Table, membership: Arc<Membership>) -> Table {
        Table { table, membership }
    }

    fn handle<T>(&self, handle: Result<node::Handle<T>, node::ClientError>) -> PyResult<Handle>
    where
        node::Handle<T>: Into<crate::handle::UnderWay>,
    {
        Ok(Handle::new(handle.map_err(client)?, self.membership.timeout()))
    }

    /// `u`, a row for every row of the table, and `v`, a column for every column of it.
    fn factors<'a>(&self, (u, v): &'a Matrices<'_>) -> PyResult<Factors<'a>> {
        let spec = self.table.spec();
        let rows = spec.shape.first().copied().unwrap_or(1);
        let columns = spec.elements().checked_div(rows).unwrap_or(0);
        let (u, v) = (arrays::elements(u)?, arrays::elements(v)?);
        let rank = (u.len() as u64).checked_div(rows).unwrap_or(0);
        let fits = rank > 0 && u.len() as u64 == rows * rank && v.len() as u64 == rank * columns;
        let rank = u32::try_from(rank).ok().filter(|_| fits);
        rank.map(|rank| Factors { rank, u, v }).ok_or_else(|| {
            let why = format!(
                "table `{}`: expected factors of shapes ({rows}, K) and (K, {columns}), got {} and {} elements",
                spec.name,
                u.len(),
                v.len()
            );
            raise("ShapeError", why)
        })
    }
}

fn numbers<'a>(rows: &'a PyReadonlyArray1<'_, u32>) -> PyResult<&'a [u32]> {
    rows.as_slice().map_err(|_| raise("ShapeError", "row numbers are not contiguous"))
}

/// Keeps parameters that an array looks at.
#[pyclass(frozen, module = "paramill._native")]
struct Values {
    _kept: node::Values,
}
