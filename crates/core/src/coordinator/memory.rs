//! What a coordinator that can be started anew has to know, and outputs that wait until it is stored.

use super::barriers::BarrierState;
use super::config::JobConfig;
use super::replication::ServersState;
use super::workers::RankState;
use crate::limits;
use crate::policy::JobPolicies;
use crate::role::{Outbox, Output};
use crate::status::JobSize;
use crate::table::TableSpec;
use crate::types::{AggregatorId, ProcessId};
use crate::wire::bounded::sequence;
use crate::wire::{Change, Plan};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Counts the layouts of the state.
const LAYOUT: u32 = 1;

/// Everything that a coordinator tells others and would not hear from them again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) identity: Identity,
    /// Incarnations of workers and readers follow from it.
    pub(super) secret: u64,
    /// Incarnations that were drawn.
    pub(super) drawn: u64,
    /// Numbers of readers that were given.
    pub(super) readers: u32,
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    pub(super) ranks: Vec<RankState>,
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_AGGREGATORS as usize }>")]
    pub(super) aggregators: Vec<AggregatorState>,
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_TABLES }>")]
    pub(super) tables: Vec<TableSpec>,
    /// `None` before there is a plan.
    pub(super) run: Option<RunState>,
    pub(super) servers: ServersState,
    pub(super) barriers: BarrierState,
    /// The job is over, and why if it failed.
    pub(super) over: Option<Option<String>>,
    /// Orders for checkpoints that were given: shards ignore one that has a number of those.
    pub(super) orders: u64,
    /// The server process that coordinated the job, if that was one.
    pub(super) own: Option<ProcessId>,
}

/// The job that a state is of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Identity {
    job: String,
    size: JobSize,
    policies: JobPolicies,
    seed: u64,
}

/// An aggregator that was there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct AggregatorState {
    pub(super) id: AggregatorId,
    pub(super) process: ProcessId,
    pub(super) address: String,
}

/// A plan, and who follows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct RunState {
    pub(super) settled: Plan,
    /// The changes from there to the newest plan.
    pub(super) unsettled: Vec<(u32, Change)>,
    /// Workers have the plan.
    pub(super) is_running: bool,
}

impl Identity {
    pub(super) fn of(config: &JobConfig) -> Identity {
        let JobConfig { job, seed, .. } = config;
        Identity { job: job.clone(), size: config.size(), policies: config.policies(), seed: *seed }
    }

    /// Whether this is the job with these options. The error says how it is another one.
    fn check(&self, config: &JobConfig) -> Result<(), RestoreError> {
        let asked = Identity::of(config);
        let differs = |what: &str, was: String, is: String| {
            Err(RestoreError::OtherJob { what: format!("{what} {was}, and this command says {is}") })
        };
        if self.job != asked.job {
            return differs("is of job", format!("`{}`", self.job), format!("`{}`", asked.job));
        }
        if self.size != asked.size {
            let words = |size: &JobSize| format!("{} workers and {} servers", size.workers, size.servers);
            return differs("is of a job with", words(&self.size), words(&asked.size));
        }
        if self.seed != asked.seed {
            return differs("is of a job with seed", self.seed.to_string(), asked.seed.to_string());
        }
        if self.policies != asked.policies {
            let what = format!("is of job `{}` with other policies than this command's", self.job);
            return Err(RestoreError::OtherJob { what });
        }
        Ok(())
    }
}

impl State {
    pub(super) fn encode(&self) -> Vec<u8> {
        postcard::to_allocvec(&(LAYOUT, self)).expect("memory takes what is serialised")
    }

    /// Reads the state of this very job.
    pub(super) fn decode(bytes: &[u8], config: &JobConfig) -> Result<State, RestoreError> {
        let (layout, rest): (u32, &[u8]) = postcard::take_from_bytes(bytes)?;
        if layout != LAYOUT {
            return Err(RestoreError::Layout { theirs: layout, ours: LAYOUT });
        }
        let (state, rest): (State, &[u8]) = postcard::take_from_bytes(rest)?;
        if !rest.is_empty() {
            return Err(RestoreError::Torn(format!("{} bytes too many", rest.len())));
        }
        state.identity.check(config)?;
        if let Some(run) = &state.run {
            run.settled.check().map_err(RestoreError::Torn)?;
            let mut newest = run.settled.clone();
            for (epoch, change) in &run.unsettled {
                newest.check_change(change).map_err(RestoreError::Torn)?;
                newest.apply(*epoch, change);
            }
        }
        Ok(state)
    }
}

/// Why a coordinator cannot go on from a state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// It is not what was stored, or not the state of a coordinator.
    #[error("it cannot be read ({0})")]
    Torn(String),
    /// Another release wrote it.
    #[error(
        "it has layout {theirs}, and this release reads layout {ours}: go on with the release that wrote it"
    )]
    Layout {
        /// The layout.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// It is another job's.
    #[error("it {what}")]
    OtherJob {
        /// The difference.
        what: String,
    },
}

impl From<postcard::Error> for RestoreError {
    fn from(error: postcard::Error) -> RestoreError {
        RestoreError::Torn(error.to_string())
    }
}

/// The order of storing and telling: what is told of a change leaves once the change is stored.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// `None` when nothing is stored. Else how long members wait for the coordinator when it is gone.
    grace: Option<Duration>,
    /// The state was stored once: peers may be let in.
    is_ready: bool,
    /// Something has changed that is not on its way to the store.
    is_dirty: bool,
    /// The driver is storing.
    is_storing: bool,
    /// Outputs that tell of what is being stored.
    held: Outbox,
    /// Outputs that may leave.
    free: Outbox,
}

impl Memory {
    /// Begins to store; members wait for so long when the coordinator is gone.
    pub(super) fn keep(&mut self, grace: Duration) {
        (self.grace, self.is_dirty) = (Some(grace), true);
    }

    /// How long members wait for a coordinator that comes back, if it does.
    pub(super) fn grace(&self) -> Option<Duration> {
        self.grace
    }

    /// Whether peers may be let in.
    pub(super) fn is_ready(&self) -> bool {
        self.grace.is_none() || self.is_ready
    }

    /// The state has changed.
    pub(super) fn touch(&mut self) {
        self.is_dirty = self.grace.is_some();
    }

    /// The next output. `outputs` are those that were made since, and `state` makes the state that they may tell of.
    pub(super) fn poll(&mut self, outputs: &mut Outbox, state: impl FnOnce() -> State) -> Option<Output> {
        if self.grace.is_none() {
            return outputs.pop_front();
        }
        if !self.free.is_empty() {
            return self.free.pop_front();
        }
        if self.is_storing {
            return None;
        }
        if !std::mem::take(&mut self.is_dirty) {
            return outputs.pop_front();
        }
        self.is_storing = true;
        self.held = std::mem::take(outputs);
        Some(Output::Remember { state: state().encode() })
    }

    /// The last state is stored.
    pub(super) fn stored(&mut self) {
        if std::mem::take(&mut self.is_storing) {
            self.is_ready = true;
            self.free = std::mem::take(&mut self.held);
        }
    }

    /// Bytes of outputs that may leave, of so many that were made since.
    pub(super) fn bytes(&self, outputs: usize) -> usize {
        self.free.bytes() + if self.is_storing { 0 } else { outputs }
    }

    pub(super) fn check(&self) -> Result<(), String> {
        self.held.check()?;
        self.free.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::role::Level;

    fn state() -> State {
        State {
            identity: Identity::of(&JobConfig::new("j", 2, 1)),
            secret: 1,
            drawn: 0,
            readers: 0,
            ranks: vec![],
            aggregators: vec![],
            tables: vec![],
            run: None,
            servers: ServersState::default(),
            barriers: BarrierState::default(),
            over: None,
            orders: 0,
            own: None,
        }
    }

    fn line(text: &str) -> Output {
        Output::Log(Level::Info, text.into())
    }

    #[test]
    fn what_tells_of_a_change_leaves_once_the_change_is_stored() {
        let (mut memory, mut outputs) = (Memory::default(), Outbox::default());
        outputs.push_back(line("a"));
        memory.touch();
        assert_eq!(memory.poll(&mut outputs, state), Some(line("a")), "nothing is stored");
        memory.keep(Duration::from_secs(1));
        assert!(!memory.is_ready());
        outputs.push_back(line("b"));
        assert!(matches!(memory.poll(&mut outputs, state), Some(Output::Remember { .. })));
        outputs.push_back(line("c"));
        memory.touch();
        assert_eq!(memory.poll(&mut outputs, state), None);
        memory.stored();
        assert!(memory.is_ready());
        assert_eq!(memory.poll(&mut outputs, state), Some(line("b")));
        assert!(
            matches!(memory.poll(&mut outputs, state), Some(Output::Remember { .. })),
            "of the next change"
        );
        assert_eq!(memory.poll(&mut outputs, state), None);
        memory.stored();
        outputs.push_back(line("d"));
        assert_eq!(memory.poll(&mut outputs, state), Some(line("c")));
        assert_eq!(memory.poll(&mut outputs, state), Some(line("d")));
        assert_eq!((memory.poll(&mut outputs, state), memory.check()), (None, Ok(())));
    }

    #[test]
    fn a_state_is_read_by_the_job_that_it_is_of() {
        let (config, bytes) = (JobConfig::new("j", 2, 1), state().encode());
        assert_eq!(State::decode(&bytes, &config), Ok(state()));
        for (other, word) in [
            (JobConfig::new("k", 2, 1), "job `j`"),
            (JobConfig::new("j", 3, 1), "2 workers and 1 servers"),
            (JobConfig { seed: 4, ..config.clone() }, "seed 0"),
        ] {
            let why = State::decode(&bytes, &other).unwrap_err().to_string();
            assert!(why.contains(word), "{why}");
        }
        let layout = State::decode(&postcard::to_allocvec(&(LAYOUT + 1, state())).unwrap(), &config);
        assert!(matches!(layout, Err(RestoreError::Layout { .. })));
        for torn in [&bytes[..bytes.len() - 1], &[&bytes[..], &[0]].concat(), &[]] {
            assert!(matches!(State::decode(torn, &config), Err(RestoreError::Torn(_))), "{torn:?}");
        }
    }
}
