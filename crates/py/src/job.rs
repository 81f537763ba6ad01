//! A worker's membership in a job.

use crate::arrays;
use crate::condition;
use crate::errors::{admin, client, copying, raise};
use crate::handle::Handle;
use crate::local::LocalSteps;
use crate::policy::policies as read_policies;
use crate::slab::{self, Exchange, Slab};
use crate::table::Table;
use crate::waiting::{ADMIN_DEADLINE, check_process, duration, timed, until_due};
use numpy::PyReadonlyArrayDyn;
use paramill_core::types::ServerId;
use paramill_node::admin::Admin;
use paramill_node::client::{self as node, JobOptions, Layer, PolicyOverride, Registry, TableSpec};
use paramill_node::env_vars;
use paramill_node::identity::Identity;
use paramill_node::url::JobUrl;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

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
    membership: Arc<Membership>,
    admin: Mutex<Option<Admin>>,
}

/// The job as its tables need it too.
pub(crate) struct Membership {
    /// Gone when it was closed.
    job: Mutex<Option<Arc<node::Job>>>,
    url: JobUrl,
    process: u32,
    timeout: Duration,
}

#[pymethods]
impl Job {
    /// Begins to join. Without a URL the environment names the job.
    #[new]
    #[pyo3(signature = (url, *, rank, timeout, transport, aggregator, rate = None, write_only = false))]
    fn new(
        url: Option<&str>,
        rank: Option<u32>,
        timeout: f64,
        transport: Option<&str>,
        aggregator: Option<String>,
        rate: Option<&str>,
        write_only: bool,
    ) -> PyResult<Job> {
        let url = url.map(|url| url.parse().map_err(|error| raise("UrlError", error))).transpose()?;
        let options = match url {
            Some(url) => JobOptions::at_with_environment(url),
            None => JobOptions::from_environment(),
        };
        let options = options.map_err(|error| raise("EnvironmentError", error))?;
        let mut options = options.timeout(duration(timeout)?);
        if let Some(rank) = rank {
            options = options.rank(rank);
        }
        if write_only {
            options = options.write_only();
        }
        if let Some(address) = aggregator {
            options = options.aggregator(address);
        }
        if let Some(transport) = transport {
            options = options.transport(transport.parse().map_err(|why| raise("PolicyError", why))?);
        }
        if let Some(rate) = rate {
            options = options.rate(rate.parse().map_err(|why| raise("PolicyError", why))?);
        }
        let job = node::Job::init(options).map_err(client)?;
        let (url, timeout) = (job.url().clone(), job.timeout());
        let job = Mutex::new(Some(Arc::new(job)));
        let membership = Arc::new(Membership { job, url, process: std::process::id(), timeout });
        Ok(Job { membership, admin: Mutex::default() })
    }

    #[getter]
    fn url(&self) -> String {
        self.membership.url.to_string()
    }

    #[getter]
    fn timeout(&self) -> f64 {
        self.membership.timeout.as_secs_f64()
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
    fn iteration(&self) -> PyResult<u64> {
        Ok(self.job()?.iteration())
    }

    fn set_samples(&self, samples: u32) -> PyResult<()> {
        self.job()?.set_samples(samples).map_err(client)
    }

    #[getter]
    fn closed(&self) -> bool {
        self.membership.lock().is_none()
    }

    /// What this worker did so far, as JSON.
    fn report(&self) -> PyResult<String> {
        let report = self.job()?.report();
        serde_json::to_string(&report).map_err(|error| raise("ParamillError", error))
    }

    /// The steps that the job has workers make by themselves, if it has some. Whoever asks follows them.
    fn local_steps(&self, py: Python<'_>) -> PyResult<Option<LocalSteps>> {
        let job = self.job()?;
        Ok(py.detach(|| job.local_steps()).map_err(client)?.map(LocalSteps::from))
    }

    /// For each of these tensors, given by name and number of elements, the number of its group: those of one group may be the
    /// layers of one table. `policies` are the texts that the table will declare.
    #[pyo3(signature = (tensors, *, policies))]
    fn groups(
        &self,
        py: Python<'_>,
        tensors: Vec<(String, u64)>,
        policies: &Bound<'_, PyDict>,
    ) -> PyResult<Vec<usize>> {
        let job = self.job()?;
        let (policy, job_policies) =
            (read_policies(policies)?, py.detach(|| job.policies()).map_err(client)?);
        let (registry, mut groups) = (Registry::builtin(), Vec::<TableSpec>::new());
        let group_of = |(name, elements): (String, u64)| {
            let table = TableSpec { policy: policy.clone(), ..TableSpec::dense(name, [elements]) };
            let known = groups.iter().position(|first| job_policies.are_alike(&registry, first, &table));
            known.unwrap_or_else(|| {
                groups.push(table);
                groups.len() - 1
            })
        };
        Ok(tensors.into_iter().map(group_of).collect())
    }

    /// Creates a table; `policies` are the texts of this table alone, and `layers` names, first elements and shapes of the
    /// tensors that it consists of, if there are several. One that is `alone` does not travel with other small tables.
    #[pyo3(signature = (name, shape, initial, *, rows, policies, alone, layers = None))]
    #[allow(clippy::too_many_arguments, reason = "Python gives them by name")]
    fn table(
        &self,
        py: Python<'_>,
        name: &str,
        shape: Vec<u64>,
        initial: PyReadonlyArrayDyn<'_, f32>,
        rows: bool,
        policies: &Bound<'_, PyDict>,
        alone: bool,
        layers: Option<Vec<(String, u64, Vec<u64>)>>,
    ) -> PyResult<Table> {
        let job = self.job()?;
        let initial = arrays::elements(&initial)?.to_vec();
        let layers = layers.unwrap_or_default().into_iter();
        let layers = layers.map(|(name, start, shape)| Layer { name, start, shape }).collect();
        let policy = read_policies(policies)?;
        let spec = TableSpec { rows, policy, layers, alone, ..TableSpec::dense(name, shape) };
        let table = py.detach(|| job.table(spec, initial)).map_err(client)?;
        Ok(Table::new(table, self.membership.clone()))
    }

    /// Has a function judge pulls of tables whose policy `sync` is `remote:NAME`, where this is worker 0.
    fn condition(&self, py: Python<'_>, name: &str, function: Py<PyAny>) -> PyResult<()> {
        let job = self.job()?;
        py.detach(|| job.condition(name, move |asked| condition::evaluate(&function, asked))).map_err(client)
    }

    /// Waits until all are here and the initial values are exchanged.
    fn start(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let (job, timeout) = (self.job()?, self.membership.timeout_or(timeout)?);
        until_due(py, timeout, |slice| job.start_is_due_within(slice).map_err(client))?;
        py.detach(|| job.start_within(Duration::ZERO)).map_err(|error| client(timed(error, timeout)))
    }

    /// Sends the gradients of slabs and asks for the parameters that follow them.
    fn exchange(&self, py: Python<'_>, slabs: Vec<Py<Slab>>) -> PyResult<Exchange> {
        slab::exchange(py, &*self.job()?, slabs)
    }

    /// Ends the iteration.
    fn clock(&self, py: Python<'_>) -> PyResult<()> {
        let job = self.job()?;
        py.detach(|| job.clock());
        Ok(())
    }

    /// Sends what is held back by the policy `hold`.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let job = self.job()?;
        py.detach(|| job.flush()).map_err(client)
    }

    /// Says that this worker is at a barrier.
    fn arrive(&self, py: Python<'_>, name: &str) -> PyResult<Handle> {
        let job = self.job()?;
        let handle = py.detach(|| job.arrive(name)).map_err(client)?;
        Ok(Handle::new(handle, self.membership.timeout))
    }

    /// How the job stands, as JSON.
    fn status(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<String> {
        let timeout = self.membership.timeout_or(timeout)?;
        let handle = self.job()?.query_status().map_err(client)?;
        until_due(py, timeout, |slice| Ok(handle.is_due_within(slice)))?;
        let status = py.detach(|| handle.wait_within(Duration::ZERO));
        let status = status.map_err(|error| client(timed(error, timeout)))?;
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

    /// Has bytes saved with checkpoints under a name.
    fn note(&self, name: &str, note: &[u8]) -> PyResult<()> {
        self.job()?.note(name, note).map_err(client)
    }

    /// What was noted under a name when the checkpoint was made that the job goes on from.
    fn noted<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyBytes>>> {
        Ok(self.job()?.noted(name).map(|note| PyBytes::new(py, &note)))
    }

    /// Has the job make a checkpoint, and waits until that is complete, and copied to a file if one is given: of the clock at which
    /// all workers rest, or of one that comes soon. What was done, in words.
    #[pyo3(signature = (timeout, file=None, at=None))]
    fn checkpoint(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        file: Option<PathBuf>,
        at: Option<u64>,
    ) -> PyResult<String> {
        let timeout = self.membership.timeout_or(timeout)?;
        let job = self.job()?;
        match file {
            Some(path) => py.detach(|| job.copy_checkpoint(&path, at, timeout)).map_err(copying),
            None => py.detach(|| job.checkpoint(timeout)).map_err(admin),
        }
    }

    /// Leaves in good order. Later calls find the job closed.
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        check_process(self.membership.process)?;
        let timeout = self.membership.timeout_or(timeout)?;
        let Some(job) = self.membership.lock().take() else { return Ok(()) };
        py.detach(|| job.close_within(timeout)).map_err(client)
    }

    /// Goes without a word: the others are told that this worker died.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.membership.process)?;
        let job = self.membership.lock().take();
        py.detach(|| job.iter().for_each(|job| job.abandon()));
        Ok(())
    }
}

impl Job {
    /// The job, while it may be used here.
    pub(crate) fn job(&self) -> PyResult<Arc<node::Job>> {
        self.membership.job()
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
                none => ask(none.insert(Admin::connect(&self.membership.url, ADMIN_DEADLINE)?)),
            };
            if answer.is_err() {
                *admin = None;
            }
            answer
        })
        .map_err(admin)
    }
}

impl Membership {
    /// The job, while it may be used here.
    pub(crate) fn job(&self) -> PyResult<Arc<node::Job>> {
        check_process(self.process)?;
        self.lock()
            .clone()
            .ok_or_else(|| raise("ClosedError", format!("the job at {} was closed here", self.url)))
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    fn timeout_or(&self, seconds: Option<f64>) -> PyResult<Duration> {
        seconds.map_or(Ok(self.timeout), duration)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<node::Job>>> {
        self.job.lock().expect("no holder of this lock panics")
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            std::mem::forget(self.lock().take());
        }
    }
}
