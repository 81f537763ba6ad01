//! A coordinator that is started anew: what it stores, how it goes on from there, and what it hears from those who come back.

use super::barriers::Barriers;
use super::checkpoints::Checkpoints;
use super::declarations::Declarations;
use super::epochs::Epochs;
use super::memory::{Identity, RestoreError, State};
use super::phase::Stage;
use super::recovery::Recovery;
use super::scheduler::{Resumed, Scheduler};
use super::{Coordinator, JobConfig, checkpointing, waiting, warnings};
use crate::limits;
use crate::registry::Registry;
use crate::types::{Clock, NodeId, ServerId, TableId, Time, WorkerId};
use crate::wire::{Control, Standing};
use std::sync::Arc;
use std::time::Duration;

/// A coordinator in place of one that is gone.
pub(super) fn restore(
    now: Time,
    config: JobConfig,
    registry: Arc<Registry>,
    grace: Duration,
    state: &[u8],
) -> Result<Coordinator, RestoreError> {
    let state = State::decode(state, &config)?;
    let mut own = Coordinator::new(config, registry, state.secret).remembering(grace);
    own.recovery = Recovery::begin(now);
    own.workers.restore(now, &state.ranks, state.drawn, state.run.is_some());
    own.readers.restore(state.readers);
    own.declarations = Declarations::restore(state.tables);
    own.barriers = Barriers::restore(state.barriers);
    own.aggregators.restore(now, &state.aggregators);
    if let Some(run) = state.run {
        own.stage = if run.is_running { Stage::Running } else { Stage::Starting };
        let epochs = Epochs::restore(now, run, state.aggregators.iter().map(|known| known.id));
        own.recovery.note_former(state.own, epochs.newest());
        own.servers.restore(now, &epochs.newest().shards);
        own.replication.restore(state.servers);
        if own.stage == Stage::Running {
            own.replication.postpone_copies(now + limits::RETURN_GRACE);
        }
        let sync = epochs.newest().policy_of(TableId(0), ServerId(0)).sync(&own.registry);
        if sync.is_ok_and(|sync| !sync.overlap) {
            own.recovery.ask_for_clocks();
        }
        own.epochs = Some(epochs);
        own.warnings =
            own.epochs.as_ref().map(|e| warnings::warnings(e.newest(), &own.registry)).unwrap_or_default();
    }
    match state.over {
        Some(failure) => {
            (own.stage, own.failure) = (Stage::Over, failure);
            own.recovery.say_farewell(own.everybody().into_iter().collect(), now);
        }
        None => {
            let phase = own.phase();
            own.note(format!(
                "the coordinator was started anew and waits for its members to come back ({phase})"
            ));
            if own.stage == Stage::Running {
                checkpointing::go_on(&mut own, now, state.orders);
            }
            waiting::await_workers(&mut own, now);
        }
    }
    Ok(own)
}

/// What this coordinator has to remember.
pub(super) fn state(own: &Coordinator) -> State {
    State {
        identity: Identity::of(&own.config),
        secret: own.workers.secret(),
        drawn: own.workers.drawn(),
        readers: own.readers.given(),
        ranks: own.workers.remembered(),
        aggregators: own.aggregators.remembered(),
        tables: own.declarations.tables().to_vec(),
        run: own.epochs.as_ref().map(|epochs| epochs.remembered(own.stage != Stage::Starting)),
        barriers: own.barriers.remembered(),
        over: (own.stage == Stage::Over).then(|| own.failure.clone()),
        servers: own.replication.remembered(own.epochs.as_ref().map(Epochs::newest)),
        orders: own.checkpoints.as_ref().map_or(0, Checkpoints::orders),
        own: own.config.own_process,
    }
}

/// Without overlap, after this coordinator was started anew: a worker says which clock it has pushed last, or that there is none.
pub(super) fn take_clock(own: &mut Coordinator, now: Time, worker: WorkerId, pushed: Option<Clock>) {
    if !own.recovery.waits_for_clocks() || !own.workers.is_running(worker) {
        return;
    }
    let member = own.epochs.as_ref().and_then(|epochs| epochs.newest().member(worker));
    let first = match member.map(|member| member.standing) {
        Some(Standing::From(clock)) => clock,
        _ => 0,
    };
    own.recovery.take_clock(worker, pushed.unwrap_or(first), pushed.is_some());
    resume_scheduler(own, now);
}

/// Makes the scheduler anew once it is known how far everybody is.
pub(super) fn resume_scheduler(own: &mut Coordinator, now: Time) {
    let running: Vec<WorkerId> = own.workers.running().collect();
    let (Some(mut clocks), Some(epochs)) = (own.recovery.poll_clocks(&running), &mut own.epochs) else {
        return;
    };
    let plan = epochs.newest();
    // A worker whose first clock was decided before, and that has not been told of it, has pushed nothing.
    for member in plan.live_members().filter(|member| !running.contains(&member.worker)) {
        if let Standing::From(clock) = member.standing {
            clocks.insert(member.worker, Resumed { clock, is_pushed: false });
        }
    }
    let sync = plan.policy_of(TableId(0), ServerId(0)).sync(&own.registry);
    let mut scheduler =
        Scheduler::resume(now, sync.expect("checked before it was put into the plan"), plan.seed, &clocks);
    for worker in epochs.joining().collect::<Vec<_>>() {
        epochs.postpone(worker, scheduler.join(worker));
    }
    let idle: Vec<(WorkerId, Clock)> = own.barriers.idlers().idle().collect();
    scheduler.set_idle(now, &idle);
    own.scheduler = Some(scheduler);
    own.send_releases();
    own.settle_epochs(now);
}

/// Somebody is heard: on each connection it is told how long this coordinator may be away.
pub(super) fn ask_for_patience(own: &mut Coordinator, of: NodeId) {
    let Some(grace) = own.memory.grace() else { return };
    if !matches!(of, NodeId::Admin(_)) && own.patient.insert(of) {
        let seconds = u32::try_from(grace.as_secs()).unwrap_or(u32::MAX);
        own.send(of, &Control::Patience { seconds });
    }
}

/// The job is over: a member hears of it. A shard that has just come back has the plan before, by which it closes the rounds that workers who
/// left are not waited for in.
pub(super) fn say_farewell(own: &mut Coordinator, to: NodeId) {
    if let NodeId::Shard(id) = to {
        own.inform_shard(id);
    }
    let message = Control::Stop { error: own.failure.clone() };
    own.send(to, &message);
    own.recovery.told(to);
}
