//! The consistency axis: when a pull is answered, when a table's version advances, what happens to late pushes.
//!
//! Words, as in FluentPS: a worker's *progress* is the iteration of the push it just made (-1 before the first);
//! `V_train` ([`SyncState::v_train`]) is the table's version on this shard, and the number of the round that is
//! open; a *DPR* is a delayed pull request.
//!
//! A model ([`Consistency`]) answers questions; it never acts. The [`Controller`] of a (table, shard) keeps the
//! state, asks the model of its [`SyncPolicy`], and holds two rules that no model can break, so that nobody waits
//! for something that cannot come:
//!
//! - a pull whose worker's every round is closed (`progress < V`) is answered: fresher parameters do not exist;
//! - a round that every live worker has pushed closes: nothing more can arrive for it.
//!
//! One model has its pull condition elsewhere ([`Consistency::remote`]): it is a function of the application, which worker 0
//! evaluates. The controller makes a [`Question`] of each pull, which waits until the verdict is here; it asks again about a
//! pull that was told to wait when the state has changed. Where there is no verdict in time the model decides by itself.

mod asp;
mod bsp;
mod cache;
mod controller;
mod drop;
mod dsps;
mod policy;
mod psp;
mod pssp;
mod question;
mod questions;
mod quorum;
mod remote;
mod ssp;
mod state;
mod stats;
mod when;

pub(crate) use controller::ControllerImage;
pub use controller::{Advance, Controller, Judged, PullOutcome, Reason, Released, Unanswered, Waiting};
pub use policy::{Exec, SyncPolicy};
pub use question::{Question, WorkerProgress};
pub use remote::{Remote, check_name};
pub use state::{SyncState, WorkerState};
pub use stats::SyncStats;

use crate::prng::Prng;
use crate::registry::Axis;
use crate::types::{Clock, Time, WorkerId};
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// The largest staleness threshold that can be asked for; beyond it, `asp` is meant.
pub const MAX_STALENESS: u64 = 1_000_000;

/// A consistency model. One method is required.
///
/// It has two sides, which are MPS's hooks as questions. Shards ask before parameters are read ([`Consistency::pull`]) and after
/// a worker's push ([`Consistency::admit`], [`Consistency::closes`]). Workers ask, each its own instance of the model, after the
/// application's update ([`Consistency::after_client_update`]), after a server's answer ([`Consistency::after_server_push`]), and
/// before they go on ([`Consistency::client_sync`]).
///
/// Everything MUST follow from the arguments and from what [`Consistency::observe`] was told: the simulator and the
/// real driver have to come to the same decisions. No method may be slow: all but `observe` are called per push or
/// per pull.
pub trait Consistency: Send + Debug {
    /// Whether this pull is answered now (the pull condition). Asked only when `pull.progress >= state.v_train()`.
    /// The generator MUST be used for nothing but chance, and only where chance decides.
    fn pull(&self, state: &SyncState, pull: &PullView, rng: &mut Prng) -> Decision;

    /// Whether the open round closes before every live worker has pushed it (the push condition). Once everybody has,
    /// it closes whatever this says. Asked only when somebody has pushed it.
    fn closes(&self, _state: &SyncState) -> Close {
        Close::No
    }

    /// Whether a gradient is a step of its own or part of its round's one step.
    fn apply(&self) -> Apply {
        Apply::OnArrival
    }

    /// Where a gradient stamped `clock` goes. MUST be [`Admit::Now`], [`Admit::Late`], or [`Admit::Round`] of a round
    /// that is not closed; the other cases are the controller's.
    fn admit(&self, clock: Clock, v_train: Clock) -> Admit {
        match self.apply() {
            Apply::OnArrival => Admit::Now,
            Apply::OnRound if clock < v_train => Admit::Late,
            Apply::OnRound => Admit::Round(clock),
        }
    }

    /// The most rounds that an answer may lack, if there is such a bound in this state. `pull` MUST NOT answer beyond
    /// it, and the soft barrier keeps it too.
    fn staleness_bound(&self, _state: &SyncState) -> Option<u64> {
        None
    }

    /// The most rounds that an answer to a pull which [`Consistency::pull`] told to wait may lack under the soft barrier.
    fn soft_bound(&self, state: &SyncState) -> Option<u64> {
        self.staleness_bound(state)
    }

    /// What the learning rate of a round's step is multiplied with. `n` is the number of live workers and of those that
    /// pushed this round and left since. MUST be exactly 1 when all `n` contributed once.
    fn lr_factor(&self, _contributions: u32, _n: u32) -> f32 {
        1.0
    }

    /// The weight, in the mean of the round that it goes to, of a gradient whose own round closed so many rounds before. MUST be
    /// above 0, and exactly 1 for a gradient that is not late.
    fn late_weight(&self, _rounds_late: Clock) -> f32 {
        1.0
    }

    /// Whether nothing but the pushes of all live workers closes a round, so that a part of the parameters may be
    /// stepped as soon as it has them. Where it is true, `closes` MUST always be [`Close::No`], `lr_factor` always 1,
    /// and `admit` MUST give a clock that is not late the round of that clock.
    fn waits_for_all(&self) -> bool {
        false
    }

    /// A worker's question: what it waits for before it computes with the parameters that it asked for.
    fn client_sync(&self) -> ClientSync {
        ClientSync::AllBlocks
    }

    /// A worker's question: what to do with a gradient that the application wants to have followed by parameters. Where the
    /// worker's copy is a cache, one pull at a time is under way, and another is asked for when the copy will not do.
    fn after_client_update(&self, update: &ClientUpdate) -> Ask {
        match &update.copy {
            Some(copy) if copy.is_asked && copy.lacks <= copy.bound => Ask::Push,
            _ => Ask::PushAndPull,
        }
    }

    /// A worker's question: whether it takes a block of parameters that a server sent after a pull condition held. What is
    /// not taken stays as it was.
    fn after_server_push(&self, _push: &ServerPush) -> bool {
        true
    }

    /// A worker's question: whether it leaves out iterations whose rounds have closed without it, so that its next gradient is of
    /// the version that it is computed with. Where a table's model does not, no iteration is left out. Where it is true, `apply`
    /// MUST be [`Apply::OnRound`], and some rounds MUST close without all workers.
    fn catches_up(&self) -> bool {
        false
    }

    /// A worker's question, where versions are broadcast: the one that it needs before it computes this iteration. `None` when
    /// that depends on more than the iteration: such a model cannot be used there.
    fn version_needed(&self, _clock: Clock) -> Option<Clock> {
        None
    }

    /// Whether pushes should be measured: [`PullView::significance`] is `None` otherwise.
    fn wants_significance(&self) -> bool {
        false
    }

    /// The condition that worker 0 evaluates, if the model has one. [`Consistency::pull`] is then asked only where worker 0 does
    /// not answer within the condition's deadline, or at all.
    fn remote(&self) -> Option<&Remote> {
        None
    }

    /// Told after each advance of `V_train`, and once when the model is set.
    fn observe(&mut self, _state: &SyncState) {}

    /// What the model has learned that [`Consistency::observe`] would not tell it again with the state as it is now: a short
    /// text or number, at most [`MAX_POLICY_BYTES`](crate::limits::MAX_POLICY_BYTES).
    fn memory(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Takes over the memory of another instance of the same model, after `observe`. MUST refuse what cannot be one, since it may come from
    /// another process.
    fn recall(&mut self, memory: &[u8]) -> Result<(), String> {
        if memory.is_empty() { Ok(()) } else { Err("the model has no memory".into()) }
    }
}

/// A pull as a model sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PullView {
    /// The worker that asks.
    pub worker: WorkerId,
    /// The last iteration it completed, as the pull says; -1 when none.
    pub progress: i64,
    /// `|g| / |w|` of its last push, when measured.
    pub significance: Option<f64>,
}

/// A model's word on a pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Send what there is.
    Answer,
    /// Delay it, because this condition does not hold. Shared, so that a decision allocates nothing.
    Wait(Arc<str>),
}

impl Decision {
    /// `Answer` when the condition holds, else a wait that names it.
    pub fn when(holds: bool, condition: &Arc<str>) -> Decision {
        if holds { Decision::Answer } else { Decision::Wait(Arc::clone(condition)) }
    }
}

/// A model's word on the open round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Close {
    /// Not yet.
    No,
    /// At once.
    Now,
    /// At the latest this long after this answer was first given for this round.
    After(Duration),
    /// At this time, or at once if it has passed.
    At(Time),
}

/// When gradients become steps of the optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Apply {
    /// Every gradient is a step as soon as it is here.
    OnArrival,
    /// The gradients of a round are aggregated and make one step when it closes.
    OnRound,
}

/// Destination of a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Admit {
    /// It is a step of its own.
    Now,
    /// It is added to this round: the open one, or a later one.
    Round(Clock),
    /// Its round is closed; it is dropped and counted.
    Late,
    /// This worker pushed this clock or a later one before; it is dropped and counted.
    Duplicate,
    /// It runs ahead further than there is memory for; the worker is told, nothing changes.
    TooFarAhead,
    /// Its sender is not a live worker of this job; it is told, nothing changes.
    UnknownWorker,
}

/// The answers that a worker waits for before it goes on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ClientSync {
    /// The answers of all servers.
    AllBlocks,
    /// Some of them.
    Partial(PartialPull),
    /// None, as long as the copy that is here lacks no more rounds than this. Where it does, an answer to a pull that says how far
    /// the worker is: servers know what else the model allows.
    Cached {
        /// The most rounds that the copy may lack.
        bound: u64,
    },
}

/// An application's update as a model sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientUpdate {
    /// The iteration of the gradient.
    pub clock: Clock,
    /// Iterations that were completed when parameters were last asked for.
    pub pulled: Clock,
    /// The worker's copy, where it is a cache.
    pub copy: Option<CopyView>,
}

/// A worker's copy of a table, as to its age.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyView {
    /// Rounds that it lacks for the next iteration.
    pub lacks: u64,
    /// The most that it may lack.
    pub bound: u64,
    /// A pull that will replace it is under way.
    pub is_asked: bool,
}

/// Requests that follow an application's update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// The gradient, and a request for the parameters that follow it.
    PushAndPull,
    /// The gradient alone: the application goes on with the parameters that are here.
    Push,
}

/// A block from a server as a model sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerPush {
    /// Iterations that the worker has completed.
    pub clock: Clock,
    /// The version of the parameters.
    pub version: Clock,
}

/// PSP's partial pulling: a worker goes on `tau2` after a fraction `b` of the blocks arrived, or when all did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PartialPull {
    /// `b`, above 0 and at most 1.
    pub fraction: f64,
    /// How long the worker waits for the rest.
    pub tau2: Duration,
}

impl PartialPull {
    /// Whether a worker may go on without some of the blocks. With b = 1 it never does, and tau2 is of no use.
    pub fn leaves_blocks_out(&self) -> bool {
        self.fraction < 1.0
    }
}

/// The choices of this axis.
pub fn axis() -> Axis<dyn Consistency> {
    Axis::new(
        "consistency model",
        policy::COMMON,
        vec![
            bsp::ENTRY,
            asp::ENTRY,
            ssp::ENTRY,
            dsps::ENTRY,
            drop::ENTRY,
            pssp::ENTRY,
            psp::ENTRY,
            quorum::ENTRY,
            when::ENTRY,
            remote::ENTRY,
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(text: &str) -> Box<dyn Consistency> {
        SyncPolicy::parse(&axis(), text).unwrap().model
    }

    /// The leads `progress - V`, from -1 to 5, that are answered for certain.
    fn answered_gaps(text: &str) -> Vec<i64> {
        let (model, state) = (model(text), SyncState::at(10, &[9, 15]));
        let always = |gap: &i64| {
            let pull = PullView { worker: WorkerId(1), progress: 10 + gap, significance: None };
            let mut rng = Prng::new(1);
            (0..200).all(|_| model.pull(&state, &pull, &mut rng) == Decision::Answer)
        };
        (-1..=5).filter(always).collect()
    }

    /// The numbers of four workers, from 0 to 4, whose pushes close the round.
    fn closing_counts(text: &str) -> Vec<usize> {
        let model = model(text);
        let closes = |&count: &usize| {
            let progress: Vec<i64> = (0..4).map(|rank| if rank < count { 10 } else { 9 }).collect();
            let mut state = SyncState::at(10, &progress);
            (0..count).for_each(|_| state.contributed(10, 1.0));
            count == 4 || model.closes(&state) != Close::No
        };
        (0..=4).filter(closes).collect()
    }

    #[test]
    fn table_iii_of_fluentps_row_by_row() {
        for (text, answered, closing) in [
            ("bsp", vec![-1], vec![4]),
            ("asp", vec![-1, 0, 1, 2, 3, 4, 5], vec![4]),
            ("ssp:s=0", vec![-1], vec![4]),
            ("ssp:s=3", vec![-1, 0, 1, 2], vec![4]),
            ("dsps:min=2,max=8", vec![-1, 0, 1], vec![4]),
            ("drop:n=3", vec![-1], vec![3, 4]),
            ("pssp:s=3,c=0.5", vec![-1, 0, 1, 2], vec![4]),
            ("pssp:s=3,c=0", vec![-1, 0, 1, 2, 3, 4, 5], vec![4]),
            ("pssp:s=3,alpha=0.8", vec![-1, 0, 1, 2], vec![4]),
            ("pssp:s=3,alpha=significance", vec![-1, 0, 1, 2], vec![4]),
            ("psp:c=2", vec![-1], vec![2, 3, 4]),
            ("quorum:q=0.5,grace=0", vec![-1], vec![2, 3, 4]),
            ("quorum:q=0.5", vec![-1], vec![4]),
            ("when:pull=gap < 0,push=count >= 3,step=round", vec![-1], vec![3, 4]),
            ("when:pull=gap < 2,push=count >= n / 2", vec![-1, 0, 1], vec![2, 3, 4]),
            ("remote:near,fallback=(when:pull=gap < 2,push=count >= n / 2)", vec![-1, 0, 1], vec![2, 3, 4]),
        ] {
            assert_eq!(answered_gaps(text), answered, "pull condition of {text}");
            assert_eq!(closing_counts(text), closing, "push condition of {text}");
        }
    }

    #[test]
    fn a_worker_waits_for_everything_and_takes_everything_but_under_partial_pulling() {
        let update = ClientUpdate { clock: 5, pulled: 2, copy: None };
        let old = ServerPush { clock: 5, version: 4 };
        for entry in axis().entries() {
            let model = model(entry.example);
            let is_partial = matches!(model.client_sync(), ClientSync::Partial(_));
            assert_eq!(is_partial, entry.name == "psp", "{}", entry.example);
            assert_eq!(model.after_client_update(&update), Ask::PushAndPull, "{}", entry.example);
            assert_eq!(model.after_server_push(&old), entry.name != "psp", "{}", entry.example);
        }
        assert!(model("psp:c=2,b=0.5").after_server_push(&ServerPush { version: 5, ..old }));
        assert!(model("psp:c=2,b=1").after_server_push(&old), "with all blocks nothing is dropped");
    }

    /// MPS's code for SSP, as questions.
    #[test]
    fn a_copy_is_used_within_the_bound_and_one_pull_at_a_time_is_under_way() {
        let bound = |text: &str| match model(text).client_sync() {
            ClientSync::Cached { bound } => Some(bound),
            ClientSync::AllBlocks | ClientSync::Partial(_) => None,
        };
        for (text, expected) in [
            ("ssp:s=3", Some(3)),
            ("ssp:s=3,cache=on", Some(3)),
            ("ssp:s=3,cache=off", None),
            ("dsps:min=2,max=8", Some(2)),
            ("dsps:min=2,max=8,cache=off", None),
            ("pssp:s=3,c=0.5", Some(3)),
            ("pssp:s=3,c=0.5,cache=off", None),
            ("bsp", None),
            ("asp", None),
            ("when:pull=gap < 3", None),
        ] {
            assert_eq!(bound(text), expected, "{text}");
        }
        let ask = |lacks, is_asked| {
            let copy = Some(CopyView { lacks, bound: 3, is_asked });
            model("ssp:s=3").after_client_update(&ClientUpdate { clock: 5, pulled: 2, copy })
        };
        assert_eq!([ask(1, false), ask(3, false)], [Ask::PushAndPull; 2], "nothing is under way");
        assert_eq!([ask(1, true), ask(3, true)], [Ask::Push; 2], "the application goes on meanwhile");
        assert_eq!(ask(4, true), Ask::PushAndPull, "it has to wait, for a pull that says how far it is");
    }

    #[test]
    fn gradients_are_steps_on_arrival_or_of_a_round() {
        for (text, behind, now, ahead) in [
            ("bsp", Admit::Late, Admit::Round(5), Admit::Round(7)),
            ("asp", Admit::Now, Admit::Now, Admit::Now),
            ("ssp:s=3", Admit::Now, Admit::Now, Admit::Now),
            ("dsps", Admit::Now, Admit::Now, Admit::Now),
            ("drop:n=3", Admit::Late, Admit::Round(5), Admit::Round(7)),
            ("drop:n=3,late=apply", Admit::Round(5), Admit::Round(5), Admit::Round(7)),
            ("pssp:s=3,c=0.5", Admit::Now, Admit::Now, Admit::Now),
            ("psp:c=2", Admit::Late, Admit::Round(5), Admit::Round(5)),
            ("quorum", Admit::Late, Admit::Round(5), Admit::Round(7)),
            ("quorum:late=weigh", Admit::Round(5), Admit::Round(5), Admit::Round(7)),
            ("quorum:late=carry", Admit::Round(5), Admit::Round(5), Admit::Round(7)),
            ("when:pull=true", Admit::Now, Admit::Now, Admit::Now),
            ("when:pull=true,step=round", Admit::Late, Admit::Round(5), Admit::Round(7)),
            ("when:pull=true,step=round,late=apply", Admit::Round(5), Admit::Round(5), Admit::Round(7)),
            ("remote:near", Admit::Now, Admit::Now, Admit::Now),
        ] {
            let model = model(text);
            assert_eq!([3, 5, 7].map(|clock| model.admit(clock, 5)), [behind, now, ahead], "{text}");
        }
    }
}
