//! A worker's membership in a job.

#![allow(unsafe_code, reason = "arrays look into buffers; see `Job::values`")]

use crate::arrays;
use crate::condition;
use crate::errors::{admin, client, raise};
use crate::policy::policies as read_policies;
use crate::slab::{self, Exchange, Slab};
use crate::waiting::{check_process, duration, timed, until_due};
use numpy::{PyArray1, PyArrayMethods, PyReadonlyArray1, PyReadonlyArrayDyn, PyReadwriteArrayDyn};
use paramill_core::types::{ServerId, WorkerId};
use paramill_node::admin::Admin;
use paramill_node::client::{self as node, Gradient, JobOptions, Layer, PolicyOverride, TableId, TableSpec};
use paramill_node::env_vars;
use paramill_node::identity::Identity;
use paramill_node::url::JobUrl;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// How long the coordinator may take to change a policy.
const ADMIN_DEADLINE: Duration = Duration::from_secs(10);

/// The rank that a launcher gave this process, how many it started, and its name.
#[pyfunction]
pub(crate) fn identity() -> PyResult<Option<(u32, Option<u32>, &'static str)>> {
    let identity = Identity::from_environment().map_err(|why| raise("EnvironmentError", why))?;
    Ok(identity.map(|identity| (identity.rank, identity.workers, identity.launcher)))
}

/// The URL that the environment names, if it does.
#[pyfunction]
pub(crate) fn environment_url() -> Option<String> {
    std::env::var(env_vars::URL).ok().filter(|url| !url.is_empty())
}

/// A worker of a job.
#[pyclass(frozen, module = "paramill._native")]
pub(crate) struct Job {
    /// Gone when it was closed.
    job: Mutex<Option<Arc<node::Job>>>,
    url: JobUrl,
    process: u32,
    timeout: Duration,
    admin: Mutex<Option<Admin>>,
}

#[pymethods]
impl Job {
    /// Begins to join. Without a URL the environment names the job.
    #[new]
    #[pyo3(signature = (url, *, rank, timeout, transport, aggregator))]
    fn new(
        url: Option<&str>,
        rank: Option<u32>,
        timeout: f64,
        transport: Option<&str>,
        aggregator: Option<String>,
    ) -> PyResult<Job> {
        let url = url.map(|url| url.parse().map_err(|error| raise("UrlError", error))).transpose()?;
        let options = match url {
            Some(url) => JobOptions::at_with_environment(url),
            None => JobOptions::from_environment(),
        };
        let mut options = options.map_err(|error| raise("EnvironmentError", error))?;
        options.timeout = duration(timeout)?;
        options.registry = Arc::new(condition::registry());
        options.rank = rank.map(WorkerId).or(options.rank);
        options.aggregator = aggregator.or(options.aggregator);
        if let Some(transport) = transport {
            options.transport = transport.parse().map_err(|why| raise("PolicyError", why))?;
        }
        let (url, timeout) = (options.url.clone(), options.timeout);
        let job = Arc::new(node::Job::init(options).map_err(client)?);
        let admin = Mutex::default();
        Ok(Job { job: Mutex::new(Some(job)), url, process: std::process::id(), timeout, admin })
    }

    #[getter]
    fn url(&self) -> String {
        self.url.to_string()
    }

    #[getter]
    fn rank(&self) -> PyResult<Option<u32>> {
        Ok(self.job()?.rank().map(|rank| rank.0))
    }

    #[getter]
    fn workers(&self) -> PyResult<Option<usize>> {
        Ok(self.job()?.workers())
    }

    #[getter]
    fn current_clock(&self) -> PyResult<u64> {
        Ok(self.job()?.current_clock())
    }

    #[getter]
    fn closed(&self) -> bool {
        self.lock().is_none()
    }

    /// Bytes of gradients sent and of parameters received.
    fn traffic(&self) -> PyResult<(u64, u64)> {
        let report = self.job()?.report();
        Ok((report.bytes_pushed, report.bytes_pulled))
    }

    /// For each of these names the number of its group: tensors of one group may be the layers of one table. `policies` are the
    /// texts that the table will declare.
    #[pyo3(signature = (names, *, policies))]
    fn groups(
        &self,
        py: Python<'_>,
        names: Vec<String>,
        policies: &Bound<'_, PyDict>,
    ) -> PyResult<Vec<usize>> {
        let job = self.job()?;
        let (policy, job_policies) =
            (read_policies(policies)?, py.detach(|| job.policies()).map_err(client)?);
        let mut groups: Vec<TableSpec> = Vec::new();
        let group_of = |name: String| {
            let table = TableSpec { policy: policy.clone(), ..TableSpec::dense(name, [1]) };
            let known = groups.iter().position(|first| job_policies.are_alike(first, &table));
            known.unwrap_or_else(|| {
                groups.push(table);
                groups.len() - 1
            })
        };
        Ok(names.into_iter().map(group_of).collect())
    }

    /// Declares a table; `policies` are the texts of this table alone, and `layers` names, first elements and shapes of the
    /// tensors that it consists of, if there are several.
    #[pyo3(signature = (name, shape, initial, *, rows, policies, layers = None))]
    #[allow(clippy::too_many_arguments, reason = "Python gives them by name")]
    fn create_table(
        &self,
        py: Python<'_>,
        name: &str,
        shape: Vec<u64>,
        initial: PyReadonlyArrayDyn<'_, f32>,
        rows: bool,
        policies: &Bound<'_, PyDict>,
        layers: Option<Vec<(String, u64, Vec<u64>)>>,
    ) -> PyResult<u32> {
        let job = self.job()?;
        let initial = arrays::elements(&initial)?.to_vec();
        let layers = layers.unwrap_or_default().into_iter();
        let layers = layers.map(|(name, start, shape)| Layer { name, start, shape }).collect();
        let policy = read_policies(policies)?;
        let spec = TableSpec { rows, policy, layers, ..TableSpec::dense(name, shape) };
        Ok(py.detach(|| job.create_table(spec, initial)).map_err(client)?.0)
    }

    /// Waits until all are here and the initial values are exchanged.
    fn start(&self, py: Python<'_>) -> PyResult<()> {
        let job = self.job()?;
        until_due(py, self.timeout, |slice| job.start_is_due_within(slice).map_err(client))?;
        py.detach(|| job.start_within(Duration::ZERO)).map_err(|error| client(timed(error, self.timeout)))
    }

    /// Sends a gradient; with `want` asks for the parameters that follow it.
    fn push(
        &self,
        py: Python<'_>,
        table: u32,
        gradient: PyReadonlyArrayDyn<'_, f32>,
        want: bool,
    ) -> PyResult<Handle> {
        let (job, table) = (self.job()?, TableId(table));
        let gradient = arrays::elements(&gradient)?;
        let handle = py.detach(|| match want {
            true => job.push_pull(table, gradient),
            false => job.push(table, Gradient::Dense(gradient)),
        });
        self.handle(handle)
    }

    /// Sends the gradients of single rows of a sparse table.
    fn push_rows(
        &self,
        py: Python<'_>,
        table: u32,
        rows: PyReadonlyArray1<'_, u32>,
        values: PyReadonlyArrayDyn<'_, f32>,
    ) -> PyResult<Handle> {
        let job = self.job()?;
        let rows = rows.as_slice().map_err(|_| raise("ShapeError", "row numbers are not contiguous"))?;
        let gradient = Gradient::Rows { rows, values: arrays::elements(&values)? };
        self.handle(py.detach(|| job.push(TableId(table), gradient)))
    }

    /// Asks for parameters; with `now` for those that are there, whatever the consistency model.
    fn pull(&self, py: Python<'_>, table: u32, now: bool) -> PyResult<Handle> {
        let (job, table) = (self.job()?, TableId(table));
        self.handle(py.detach(|| if now { job.pull_now(table) } else { job.pull(table) }))
    }

    /// Asks for single rows of a sparse table.
    fn pull_rows(&self, py: Python<'_>, table: u32, rows: PyReadonlyArray1<'_, u32>) -> PyResult<Handle> {
        let job = self.job()?;
        let rows = rows.as_slice().map_err(|_| raise("ShapeError", "row numbers are not contiguous"))?;
        self.handle(py.detach(|| job.pull_rows(TableId(table), rows)))
    }

    /// A dense table's parameters as last pulled, without copying them.
    fn values<'py>(&self, py: Python<'py>, table: u32) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let values = self.job()?.values(TableId(table)).map_err(client)?;
        let (start, len) = (values.as_slice().as_ptr(), values.len());
        let owner = Bound::new(py, Values { _kept: values })?.into_any();
        // SAFETY: the owner keeps the buffer, and a buffer that somebody keeps is not changed.
        let array = unsafe { arrays::view(start, len, owner) };
        array.readwrite().make_nonwriteable();
        Ok(array)
    }

    /// Copies a dense table's parameters as last pulled.
    fn read_into(&self, py: Python<'_>, table: u32, mut out: PyReadwriteArrayDyn<'_, f32>) -> PyResult<()> {
        let job = self.job()?;
        let out = arrays::elements_mut(&mut out)?;
        let outcome = py.detach(|| {
            job.read(TableId(table), |values| {
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
    fn slab(&self, table: u32) -> PyResult<Slab> {
        Slab::new(self.job()?, TableId(table))
    }

    /// Sends the gradients of slabs and asks for the parameters that follow them.
    fn exchange(&self, py: Python<'_>, slabs: Vec<Py<Slab>>) -> PyResult<Exchange> {
        slab::exchange(py, &*self.job()?, slabs)
    }

    /// Ends the iteration.
    fn clock(&self) -> PyResult<()> {
        self.job()?.clock();
        Ok(())
    }

    /// Says that this worker is at a barrier.
    fn arrive(&self, name: &str) -> PyResult<Handle> {
        self.handle(self.job()?.arrive(name))
    }

    /// How the job stands, as JSON.
    fn status(&self, py: Python<'_>) -> PyResult<String> {
        let job = self.job()?;
        let status = py.detach(|| job.status()).map_err(client)?;
        serde_json::to_string(&status).map_err(|error| raise("ParamillError", error))
    }

    /// Changes policies of the tables that match; on return all servers follow them.
    fn set(
        &self,
        py: Python<'_>,
        table: &str,
        server: Option<u32>,
        policies: &Bound<'_, PyDict>,
    ) -> PyResult<String> {
        let change = PolicyOverride::new(table, read_policies(policies)?).on(server.map(ServerId));
        self.with_admin(py, |admin| {
            let done = admin.set(change)?;
            // Servers report after what they were told before.
            admin.status().map(|_| done)
        })
    }

    /// Leaves in good order. Later calls find the job closed.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        let Some(job) = self.lock().take() else { return Ok(()) };
        py.detach(|| job.leave()).map_err(client)
    }

    /// Goes without a word: the others are told that this worker died.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        let job = self.lock().take();
        py.detach(|| job.iter().for_each(|job| job.abandon()));
        Ok(())
    }
}

impl Job {
    fn lock(&self) -> MutexGuard<'_, Option<Arc<node::Job>>> {
        self.job.lock().expect("no holder of this lock panics")
    }

    fn job(&self) -> PyResult<Arc<node::Job>> {
        check_process(self.process)?;
        self.lock()
            .clone()
            .ok_or_else(|| raise("ClosedError", format!("the job at {} was closed here", self.url)))
    }

    fn handle(&self, handle: Result<node::Handle, node::ClientError>) -> PyResult<Handle> {
        let handle = Some(handle.map_err(client)?);
        Ok(Handle { handle: Mutex::new(handle), process: self.process })
    }

    fn with_admin<T: Send>(
        &self,
        py: Python<'_>,
        ask: impl FnOnce(&mut Admin) -> Result<T, paramill_node::admin::AdminError> + Send,
    ) -> PyResult<T> {
        self.job()?;
        py.detach(|| {
            let mut admin = self.admin.lock().expect("no holder of this lock panics");
            let answer = match &mut *admin {
                Some(admin) => ask(admin),
                none => ask(none.insert(Admin::connect(&self.url, ADMIN_DEADLINE)?)),
            };
            if answer.is_err() {
                *admin = None;
            }
            answer
        })
        .map_err(admin)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            std::mem::forget(self.lock().take());
        }
    }
}

/// Keeps parameters that an array looks at.
#[pyclass(frozen, module = "paramill._native")]
struct Values {
    _kept: node::Lease,
}

/// A push or pull under way.
#[pyclass(frozen, module = "paramill._native")]
pub(crate) struct Handle {
    /// Gone when it brought its rows.
    handle: Mutex<Option<node::Handle>>,
    process: u32,
}

#[pymethods]
impl Handle {
    /// Waits until it is due. After a time-out it may be called again.
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        check_process(self.process)?;
        let timeout = duration(timeout)?;
        until_due(py, timeout, |slice| Ok(self.with(|handle| handle.is_due_within(slice)).unwrap_or(true)))?;
        let outcome = py.detach(|| self.with(|handle| handle.wait(Duration::ZERO))).unwrap_or(Ok(()));
        outcome.map_err(|error| client(timed(error, timeout)))
    }

    /// The same for a pull of rows, once.
    fn wait_rows<'py>(&self, py: Python<'py>, timeout: f64) -> PyResult<Bound<'py, PyArray1<f32>>> {
        self.wait(py, timeout)?;
        let handle = self.lock().take();
        let rows = handle.map(|handle| handle.wait_rows(Duration::ZERO)).transpose().map_err(client)?;
        let rows = rows.ok_or_else(|| raise("OrderError", "these rows were taken already"))?;
        Ok(PyArray1::from_vec(py, rows))
    }

    /// Whether `wait` would return at once.
    fn is_due(&self, py: Python<'_>) -> PyResult<bool> {
        check_process(self.process)?;
        Ok(py.detach(|| self.with(node::Handle::is_due).unwrap_or(true)))
    }
}

impl Handle {
    fn lock(&self) -> MutexGuard<'_, Option<node::Handle>> {
        self.handle.lock().expect("no holder of this lock panics")
    }

    fn with<T>(&self, look: impl FnOnce(&node::Handle) -> T) -> Option<T> {
        self.lock().as_ref().map(look)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            std::mem::forget(self.lock().take());
        }
    }
}
