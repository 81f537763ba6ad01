//! How to join a job.

use super::error::ClientError;
use crate::env_vars;
use crate::event_loop::Injection;
use crate::identity::Identity;
use crate::log::{Level, Log};
use crate::transport::Transport;
use crate::transport::memory::{Hub, SCHEME};
use crate::url::JobUrl;
use paramill_core::registry::Registry;
use paramill_core::types::WorkerId;
use std::sync::Arc;
use std::time::Duration;

/// How long calls wait unless told otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// How to join a job: [`JobOptions::at`] or [`JobOptions::from_environment`], then what is to be otherwise.
///
/// ```
/// use paramill_node::client::JobOptions;
/// use std::time::Duration;
///
/// let options = JobOptions::at("paramill://localhost:7070/run42".parse()?)
///     .rank(3)
///     .timeout(Duration::from_secs(10))
///     .log(|level, line| println!("{level:?}: {line}"));
/// # drop(options);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "options join nothing until they are given to `Job::init`"]
pub struct JobOptions {
    pub(super) url: JobUrl,
    pub(super) memory: Option<Hub>,
    pub(super) transport: Transport,
    pub(super) rank: Option<WorkerId>,
    pub(super) aggregator: Option<String>,
    pub(super) timeout: Duration,
    pub(super) congestion: Option<String>,
    pub(super) registry: Arc<Registry>,
    pub(super) injection: Injection,
    pub(super) log: Log,
}

impl JobOptions {
    /// Joins the job at `url` with the defaults of everything else.
    pub fn at(url: JobUrl) -> JobOptions {
        JobOptions {
            url,
            memory: None,
            transport: Transport::default(),
            rank: None,
            aggregator: None,
            timeout: DEFAULT_TIMEOUT,
            congestion: None,
            registry: Arc::new(Registry::builtin()),
            injection: Injection::default(),
            log: Log::default(),
        }
    }

    /// Joins servers of this process.
    pub fn in_memory(hub: &Hub, job: &str) -> JobOptions {
        let url = JobUrl { address: format!("{SCHEME}coordinator"), job: job.to_owned() };
        JobOptions { memory: Some(hub.clone()), ..JobOptions::at(url) }
    }

    /// Joins the job that the environment names, under the rank that its launcher gave.
    pub fn from_environment() -> Result<JobOptions, ClientError> {
        let url = std::env::var(env_vars::URL).map_err(|_| {
            ClientError::Environment(format!(
                "{} is not set; start this program with `paramill launch`",
                env_vars::URL
            ))
        })?;
        let url = url.parse().map_err(|error| problem(env_vars::URL, &format!("{error}")))?;
        JobOptions::at_with_environment(url)
    }

    /// Joins the job at `url`, with all else as the environment says.
    pub fn at_with_environment(url: JobUrl) -> Result<JobOptions, ClientError> {
        let identity = Identity::from_environment().map_err(ClientError::Environment)?;
        let rank = identity.map(|identity| WorkerId(identity.rank));
        let congestion = std::env::var(env_vars::CONGESTION).ok();
        let aggregator = std::env::var(env_vars::AGGREGATOR).ok();
        let transport = match std::env::var(env_vars::TRANSPORT) {
            Ok(text) => text.parse().map_err(|error: String| problem(env_vars::TRANSPORT, &error))?,
            Err(_) => Transport::default(),
        };
        Ok(JobOptions { rank, aggregator, congestion, transport, ..JobOptions::at(url) })
    }

    /// How servers may be reached.
    pub fn transport(mut self, transport: Transport) -> JobOptions {
        self.transport = transport;
        self
    }

    /// The worker's rank. Without one the coordinator chooses.
    pub fn rank(mut self, rank: u32) -> JobOptions {
        self.rank = Some(WorkerId(rank));
        self
    }

    /// Goes to the servers through the aggregator at this address. Several, with commas between them, are tried in order,
    /// those of this host first.
    pub fn aggregator(mut self, address: impl Into<String>) -> JobOptions {
        self.aggregator = Some(address.into());
        self
    }

    /// How long calls wait unless told otherwise; [`DEFAULT_TIMEOUT`] without it.
    pub fn timeout(mut self, timeout: Duration) -> JobOptions {
        self.timeout = timeout;
        self
    }

    /// TCP's congestion control, by name. Without one: what is best within a host, the system's default beyond it.
    pub fn congestion(mut self, name: impl Into<String>) -> JobOptions {
        self.congestion = Some(name.into());
        self
    }

    /// The components that can be named; the built-in ones without it.
    pub fn registry(mut self, registry: Arc<Registry>) -> JobOptions {
        self.registry = registry;
        self
    }

    /// Takes the lines that are written about the job, which go to stderr otherwise. The worker's thread calls it, and
    /// waits for it.
    pub fn log(mut self, take: impl Fn(Level, &str) + Send + Sync + 'static) -> JobOptions {
        self.log = Log::new(take);
        self
    }

    /// Tries faults: for tests and experiments.
    pub fn inject(mut self, injection: Injection) -> JobOptions {
        self.injection = injection;
        self
    }
}

fn problem(name: &str, why: &str) -> ClientError {
    ClientError::Environment(format!("{name} {why}"))
}
