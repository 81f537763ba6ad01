//! A server inside of a Python process, for scripts that run alone.

use crate::errors::{admin, raise};
use crate::policy::policies as read_policies;
use crate::waiting::{ADMIN_DEADLINE, duration, until_due};
use paramill_core::broadcast::Topology;
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::Policy;
use paramill_core::registry::Registry;
use paramill_node::Log;
use paramill_node::admin::Admin;
use paramill_node::data_cores::data_cores;
use paramill_node::server::{self as node, ServerConfig};
use paramill_node::url::JobUrl;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// A server whose threads are this process's.
#[pyclass(frozen, module = "paramill._native")]
pub(crate) struct Server {
    server: Mutex<Option<node::Server>>,
    url: String,
    process: u32,
}

#[pymethods]
impl Server {
    /// Starts the first server of a job; it listens when this returns.
    #[new]
    #[pyo3(signature = (job, *, listen, workers, servers, cores, policies, seed, quiet, replicas = 0, topology = None, digest_every = None))]
    #[allow(clippy::too_many_arguments, reason = "all are named where it is called")]
    fn new(
        py: Python<'_>,
        job: &str,
        listen: &str,
        workers: u32,
        servers: u32,
        cores: Option<u32>,
        policies: &Bound<'_, PyDict>,
        seed: u64,
        quiet: bool,
        replicas: u32,
        topology: Option<&str>,
        digest_every: Option<u64>,
    ) -> PyResult<Server> {
        let registry = Arc::new(Registry::builtin());
        let policy = Policy::default().under(read_policies(policies)?.with_outer());
        let topology = topology.map_or(Ok(Topology::default()), Topology::parse);
        let topology = topology.map_err(|error| raise("PolicyError", error))?;
        let coordinate =
            JobConfig { policy, seed, topology, replicas, ..JobConfig::new(job, workers, servers) };
        let cores = cores.unwrap_or_else(|| data_cores(listen, &coordinate.size()));
        let mut config =
            ServerConfig { coordinate: Some(coordinate), cores, seed, ..ServerConfig::new(job, listen) };
        config.digest_every = digest_every.unwrap_or(config.digest_every);
        Server::start(py, config, &registry, quiet)
    }

    /// Starts a further server of the job at `url`.
    #[staticmethod]
    #[pyo3(signature = (url, *, cores, seed, quiet))]
    fn joining(py: Python<'_>, url: &str, cores: Option<u32>, seed: u64, quiet: bool) -> PyResult<Server> {
        let url: JobUrl = url.parse().map_err(|error| raise("UrlError", error))?;
        let cores = match cores {
            Some(cores) => cores,
            None => {
                let ask = || Admin::connect(&url, ADMIN_DEADLINE)?.status();
                data_cores(&url.address, &py.detach(ask).map_err(admin)?.size)
            }
        };
        let config = ServerConfig { cores, seed, ..ServerConfig::new(&url.job, &url.address) };
        Server::start(py, config, &Arc::new(Registry::builtin()), quiet)
    }

    #[getter]
    fn url(&self) -> &str {
        &self.url
    }

    /// Asks its threads to end, whatever the job does.
    fn stop(&self, py: Python<'_>) {
        let server = self.lock().take();
        if std::process::id() == self.process {
            py.detach(|| drop(server));
        } else {
            std::mem::forget(server);
        }
    }

    /// Waits until the job is over. Meanwhile the server stays where `stop` finds it.
    #[pyo3(signature = (timeout=None))]
    fn join(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = timeout.map_or(Ok(Duration::MAX), duration)?;
        let mut is_over = false;
        until_due(py, limit, |slice| {
            is_over = self.lock().as_ref().is_none_or(node::Server::is_over);
            if !is_over {
                std::thread::sleep(slice);
            }
            Ok(is_over)
        })?;
        if !is_over {
            return Err(raise(
                "DeadlineError",
                format!("the job is not over after {} s", limit.as_secs_f64()),
            ));
        }
        let Some(server) = self.lock().take() else { return Ok(()) };
        py.detach(|| server.join()).map_err(|error| raise("ParamillError", error))
    }
}

impl Server {
    /// Starts a server; it listens when this returns.
    fn start(
        py: Python<'_>,
        mut config: ServerConfig,
        registry: &Arc<Registry>,
        quiet: bool,
    ) -> PyResult<Server> {
        if quiet {
            config.log = Log::none();
        }
        let job = config.job.clone();
        let server =
            py.detach(|| node::start(config, registry)).map_err(|error| raise("ParamillError", error))?;
        let url = JobUrl { address: server.coordinator().to_owned(), job }.to_string();
        Ok(Server { server: Mutex::new(Some(server)), url, process: std::process::id() })
    }

    fn lock(&self) -> MutexGuard<'_, Option<node::Server>> {
        self.server.lock().expect("no holder of this lock panics")
    }
}
