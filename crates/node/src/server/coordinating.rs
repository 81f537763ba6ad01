//! The coordinator in a server's process: begun, gone on with from what was stored, or elected among several processes.

use super::threads::Threads;
use super::{ServerConfig, announced, invalid, random_number};
use crate::clock;
use crate::event_loop::{Rest, RoleCell};
use crate::log::Level;
use crate::state_store::{EtcdPlace, Keeper, Standing, StatePlace, StateStore};
use crate::transport::elected::Elected;
use crate::transport::tcp;
use crate::waker::Waker;
use paramill_core::coordinator::{Coordinator, JobConfig};
use paramill_core::registry::Registry;
use paramill_core::role::Role;
use paramill_core::status::Status;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How often a process that would take over looks whether it may.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A coordinator that nobody else can take the place of: it begins, or goes on from what a process before it has stored.
pub(super) fn alone(
    store: Option<&mut dyn StateStore>,
    job: JobConfig,
    config: &ServerConfig,
    registry: &Arc<Registry>,
) -> io::Result<Coordinator> {
    let Some((store, place)) = store.zip(config.state.as_ref()) else {
        check_new(&job, config)?;
        return Ok(Coordinator::new(job, registry.clone(), random_number()));
    };
    let state = store.load().map_err(|error| invalid(error.to_string()))?;
    let role = remembered(state.as_deref(), place, job.clone(), config, registry)?;
    // The process before this one is dead, or it would still have the store.
    if !role.has_lost_parameters() {
        return Ok(role);
    }
    let line = format!(
        "the job whose state is in {place} ended with parameters that only its first server had; it begins anew (`--replicas 1` keeps copies, \
         and `paramill coordinate` runs a coordinator that may die without parameters)"
    );
    config.log.line(Level::Warn, &line);
    remembered(None, place, job, config, registry)
}

/// A coordinator that goes on from what was stored, or begins.
fn remembered(
    state: Option<&[u8]>,
    place: &StatePlace,
    job: JobConfig,
    config: &ServerConfig,
    registry: &Arc<Registry>,
) -> io::Result<Coordinator> {
    let grace = config.coordinator_grace;
    let Some(state) = state else {
        check_new(&job, config)?;
        return Ok(Coordinator::new(job, registry.clone(), random_number()).remembering(grace));
    };
    Coordinator::restore(clock::now(), job, registry.clone(), grace, state).map_err(|error| {
        invalid(format!(
            "the state in {place} cannot be used: {error}. Start the job with the options that it had, give another --state, or remove \
             that one"
        ))
    })
}

/// Whether a job may begin with the checkpoints that are there. A coordinator that goes on with a job finds those that it has made.
fn check_new(job: &JobConfig, config: &ServerConfig) -> io::Result<()> {
    match (&job.checkpoints, &config.checkpoints.archive) {
        (Some(checkpoints), Some(archive)) => {
            archive.check_new(checkpoints).map_err(|error| invalid(error.to_string()))
        }
        _ => Ok(()),
    }
}

/// A process that coordinates the job whenever it is elected.
pub(super) struct Candidate {
    place: EtcdPlace,
    job: JobConfig,
    /// Where it listens when it coordinates the job, and what others are told.
    listen: String,
    address: String,
    elected: Arc<Elected>,
}

impl Candidate {
    /// Whether this process could coordinate the job is found out now, and not when it has to.
    pub(super) fn new(
        place: &EtcdPlace,
        job: JobConfig,
        config: &ServerConfig,
        registry: &Arc<Registry>,
    ) -> io::Result<Candidate> {
        let state = place.peek().map_err(|error| invalid(error.to_string()))?;
        remembered(state.as_deref(), &StatePlace::Etcd(place.clone()), job.clone(), config, registry)?;
        // A process that does not coordinate the job takes no connections: members that look for the coordinator try the next address.
        let listener = tcp::listen(&config.coordinator)?;
        let bound = listener.local_addr()?;
        let host = config.hosts.first().filter(|_| bound.ip().is_unspecified());
        let address = announced(&listener, host.map(String::as_str))?;
        let elected = Arc::new(Elected::new(place.name()));
        Ok(Candidate { place: place.clone(), job, listen: bound.to_string(), address, elected })
    }

    /// Where others find this process when it coordinates the job.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Where the data cores of this process find the coordinator.
    pub(super) fn elected(&self) -> &Arc<Elected> {
        &self.elected
    }

    /// Coordinates the job whenever nobody else does, until the job is over or this process has left it.
    pub(super) fn run(self, threads: &Arc<Threads>, last: &Arc<OnceLock<Status>>) -> Result<(), String> {
        let log = &threads.config().log;
        let mut candidacy = self.place.candidacy(&self.address);
        let mut told = None;
        let tell = |told: &mut Option<String>, level, line: String| {
            if told.as_ref() != Some(&line) {
                log.line(level, &line);
                *told = Some(line);
            }
        };
        while !threads.are_stopped() && !threads.have_cores_ended() {
            match candidacy.stand() {
                Ok(Standing::Follows(other)) => {
                    self.elected.set(&other);
                    let line =
                        format!("{other} coordinates the job; this process takes over when it is gone");
                    tell(&mut told, Level::Info, line);
                }
                Ok(Standing::Over) => {
                    threads.stop();
                    return Ok(());
                }
                Ok(Standing::Leads(store, state)) => {
                    tell(&mut told, Level::Info, "this process coordinates the job from now on".into());
                    match self.coordinate(Box::new(store), state.as_deref(), threads, last) {
                        Ok(Term::Ended(result)) => return result,
                        Ok(Term::Lost(why)) => log.line(Level::Warn, &why),
                        Err(error) => {
                            log.line(
                                Level::Warn,
                                &format!("this process cannot coordinate the job: {error}"),
                            );
                            return Err(error.to_string());
                        }
                    }
                }
                Err(error) => tell(&mut told, Level::Warn, error.to_string()),
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    fn coordinate(
        &self,
        store: Box<dyn StateStore>,
        state: Option<&[u8]>,
        threads: &Arc<Threads>,
        last: &Arc<OnceLock<Status>>,
    ) -> io::Result<Term> {
        let (config, waker) = (threads.config(), Waker::new()?);
        let place = StatePlace::Etcd(self.place.clone());
        let coordinator = remembered(state, &place, self.job.clone(), config, threads.registry())?;
        let keeper = Some(Keeper::start(store, waker.clone(), config.log.clone())?);
        let listener = tcp::listener(tcp::listen(&self.listen)?, &threads.dialler().sockets.for_control());
        self.elected.set(&self.address);
        let is_deposed = Arc::<AtomicBool>::default();
        let (final_status, is_lost) = (last.clone(), is_deposed.clone());
        let role = Coordinating { coordinator, keeper, final_status, is_deposed };
        let result = threads.event_loop(vec![listener], role, waker)?.run();
        Ok(match result {
            Err(why) if is_lost.load(Ordering::Relaxed) => Term::Lost(why),
            result => Term::Ended(result),
        })
    }
}

/// How a process's time as coordinator ended.
enum Term {
    /// The job is over, or this process is to end.
    Ended(Result<(), String>),
    /// Another process coordinates the job.
    Lost(String),
}

/// The coordinator in its loop, which leaves the job's last status behind.
pub(super) struct Coordinating {
    coordinator: Coordinator,
    /// Stores what it has to know, if anything does.
    keeper: Option<Keeper>,
    final_status: Arc<OnceLock<Status>>,
    /// Set when another process coordinates the job.
    is_deposed: Arc<AtomicBool>,
}

impl Coordinating {
    pub(super) fn new(
        coordinator: Coordinator,
        keeper: Option<Keeper>,
        final_status: Arc<OnceLock<Status>>,
    ) -> Coordinating {
        Coordinating { coordinator, keeper, final_status, is_deposed: Arc::default() }
    }
}

impl RoleCell for Coordinating {
    type Role = Coordinator;

    fn with<T>(&mut self, visit: impl FnOnce(&mut Coordinator) -> T) -> T {
        visit(&mut self.coordinator)
    }

    fn lend(&self) -> Option<&Coordinator> {
        Some(&self.coordinator)
    }

    fn remember(&mut self, state: Vec<u8>) {
        if let Some(keeper) = &mut self.keeper {
            keeper.store(state);
        }
    }

    fn rest(&mut self) -> Rest {
        let Coordinating { coordinator, keeper, .. } = self;
        if keeper.as_mut().is_some_and(Keeper::poll_stored) {
            coordinator.handle_remembered(clock::now());
        }
        if let Some(why) = keeper.as_ref().and_then(Keeper::failure)
            && !self.is_deposed.swap(true, Ordering::Relaxed)
        {
            coordinator.step_down(why.to_owned());
        }
        Rest { has_work: coordinator.backlog_bytes() > 0, next_timeout: coordinator.next_timeout() }
    }

    fn ended(&self, error: Option<&str>) {
        if let Some(keeper) = self.keeper.as_ref().filter(|_| self.coordinator.is_over()) {
            keeper.remove();
        }
        // A role that panicked is not asked any more.
        if error.is_none() {
            let _ = self.final_status.set(self.coordinator.status(clock::now()));
        }
    }
}
