//! How to join a job.

use super::error::ClientError;
use crate::env_vars;
use crate::event_loop::Injection;
use crate::identity::Identity;
use crate::log::{Level, Log};
use crate::ports::Ports;
use crate::rate::Rate;
use crate::transport::Transport;
use crate::transport::memory::{Hub, SCHEME};
use crate::url::JobUrl;
use paramill_core::fault::{FaultError, FaultPlan};
use paramill_core::limits;
use paramill_core::registry::Registry;
use paramill_core::types::WorkerId;
use paramill_core::worker::{Access, Loops};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// How long calls wait unless told otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// Loops of a worker that is told no number, at most: eight connections bring as much as memory takes.
const MOST_LOOPS: usize = 8;

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
    pub(super) access: Access,
    pub(super) aggregator: Option<String>,
    pub(super) timeout: Duration,
    pub(super) loops: Option<usize>,
    pub(super) congestion: Option<String>,
    pub(super) ports: Option<Ports>,
    pub(super) rate: Option<Rate>,
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
            access: Access::Full,
            aggregator: None,
            timeout: DEFAULT_TIMEOUT,
            loops: None,
            congestion: None,
            ports: None,
            rate: None,
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
        let loops = match std::env::var(env_vars::LOOPS) {
            Ok(text) => Some(parse_loops(&text).map_err(|error| problem(env_vars::LOOPS, &error))?),
            Err(_) => None,
        };
        let ports = match std::env::var(env_vars::PORTS) {
            Ok(text) => Some(text.parse().map_err(|error: String| problem(env_vars::PORTS, &error))?),
            Err(_) => None,
        };
        let rate = match std::env::var(env_vars::RATE) {
            Ok(text) => Some(text.parse().map_err(|error: String| problem(env_vars::RATE, &error))?),
            Err(_) => None,
        };
        let injection = match std::env::var(env_vars::INJECT) {
            Ok(text) => injection(&text).map_err(|error| problem(env_vars::INJECT, &error.to_string()))?,
            Err(_) => Injection::default(),
        };
        Ok(JobOptions {
            rank,
            aggregator,
            loops,
            congestion,
            ports,
            rate,
            transport,
            injection,
            ..JobOptions::at(url)
        })
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

    /// Reads only, and so as nobody in particular, and by itself.
    pub(super) fn read_only(self) -> JobOptions {
        JobOptions { access: Access::ReadOnly, rank: None, aggregator: None, loops: Some(1), ..self }
    }

    /// Pushes only: nothing of tables that are broadcast comes back, and no memory is taken for it.
    pub fn write_only(mut self) -> JobOptions {
        self.access = Access::WriteOnly;
        self
    }

    /// Goes to the servers through the aggregator at this address. Several, with commas between them, are tried in order,
    /// those of this host first. The addresses of one that has several cores have `+` between cores.
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

    /// The ports that this worker may listen on, where it passes streams on to others. Without them the system chooses one.
    pub fn ports(mut self, ports: Ports) -> JobOptions {
        self.ports = Some(ports);
        self
    }

    /// What this worker sends at most, over all of its TCP connections to servers and workers together: a leaky bucket. Refused where
    /// nothing goes over TCP.
    pub fn rate(mut self, rate: Rate) -> JobOptions {
        self.rate = Some(rate);
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

    /// Threads that this worker's connections are spread over, from 1 to 64. Without a number, as many as help: half of the CPUs,
    /// divided by the workers of the job, and up to 8.
    pub fn loops(mut self, loops: usize) -> JobOptions {
        self.loops = Some(loops);
        self
    }

    /// The loops of the worker. Half of the CPUs are left to its application, or to the servers of a job on one host.
    pub(super) fn spread(&self) -> io::Result<Loops> {
        if let Some(loops) = self.loops {
            check_loops(loops).map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
            return Ok(Loops::Exactly(loops));
        }
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Loops::UpTo((cpus / 2).clamp(1, MOST_LOOPS)))
    }
}

/// Faults as the environment has them. The program does not know of them, so what only it could carry out is refused.
fn injection(text: &str) -> Result<Injection, FaultError> {
    let texts: Vec<&str> = text.split(';').map(str::trim).filter(|text| !text.is_empty()).collect();
    let plan = FaultPlan::parse(&texts)?;
    plan.check_for_programs()?;
    Ok(Injection { plan, seed: 1 })
}

/// A number of loops, as users write it.
pub fn parse_loops(text: &str) -> Result<usize, String> {
    let loops = text.parse().map_err(|_| format!("`{text}` is no number; {NUMBERS_OF_LOOPS}"))?;
    check_loops(loops).map(|()| loops)
}

const NUMBERS_OF_LOOPS: &str = "a worker has from 1 to 64 loops";
const _: () = assert!(limits::MAX_LOOPS == 64, "as the sentence says");

fn check_loops(loops: usize) -> Result<(), String> {
    let is_possible = (1..=limits::MAX_LOOPS).contains(&loops);
    if is_possible { Ok(()) } else { Err(format!("{loops} loops: {NUMBERS_OF_LOOPS}")) }
}

fn problem(name: &str, why: &str) -> ClientError {
    ClientError::Environment(format!("{name} {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_the_environment_are_all_read() {
        let injection = injection("worker=1:pause=2s@1s; pull:delay=1ms,p=0.5;").expect("two faults");
        let rules: Vec<String> = injection.plan.rules().iter().map(ToString::to_string).collect();
        assert_eq!(rules, ["worker=1:pause=2s@1s", "pull:delay=1ms,p=0.5"]);
    }

    #[test]
    fn faults_that_the_program_would_have_to_carry_out_are_refused() {
        let refused = |text| injection(text).expect_err("it is refused").to_string();
        assert!(refused("worker=1:slow=4x").contains("cannot be slowed"));
        assert!(refused("worker=1:sleepy").contains("fault `worker=1:sleepy`"));
    }
}
