//! A coordinator whose job cannot go on without a worker.

use super::Coordinator;
use super::phase::Stage;
use super::vacancy::Vacancy;
use crate::status::MemberState;
use crate::types::{TableId, Time, WorkerId};
use crate::wire::Member;

/// A planned job without a live worker waits for one, or is over.
pub(super) fn await_workers(own: &mut Coordinator, now: Time) {
    if own.stage == Stage::Over || !own.is_planned() || own.workers.live().next().is_some() {
        return;
    }
    let error = own.workers.have_all_died().then(|| "all workers died".into());
    // One that died may come back to finish its work, though others have left with theirs done.
    if own.workers.count(MemberState::Dead) == 0 {
        return own.end(now, error);
    }
    wait_for(own, now, None, error);
}

/// A shard cannot go on without the initial values of a table. If the plan has a worker 0 by now, that one sends them.
pub(super) fn lack_values(own: &mut Coordinator, now: Time, table: TableId) {
    let Some(epochs) = &own.epochs else { return };
    let (plan, first) = (epochs.newest(), WorkerId::FIRST);
    let Some(table) = plan.tables.get(table.0 as usize) else { return };
    if plan.member(first).is_some_and(Member::is_live) || own.vacancy.is_some() {
        return;
    }
    let error = format!(
        "{first} was gone before the initial values of table `{}` were here; start the job anew",
        table.name
    );
    wait_for(own, now, Some(first), Some(error));
}

/// The job cannot go on until a worker is started anew.
pub(super) fn wait_for(own: &mut Coordinator, now: Time, of: Option<WorkerId>, error: Option<String>) {
    let grace = own.config.restart_grace;
    if !grace.is_zero() {
        let who = of.map_or("a worker".into(), |worker| worker.to_string());
        own.log(format!("the job waits for {who} to be started anew, {} s at most", grace.as_secs_f64()));
    }
    own.vacancy = Some(Vacancy { of, error, since: now });
    expire_vacancy(own, now);
}

pub(super) fn vacancy_deadline(own: &Coordinator) -> Option<Time> {
    let vacancy = own.vacancy.as_ref().filter(|_| own.stage != Stage::Over)?;
    vacancy.deadline(&own.workers, &own.standstill, own.config.restart_grace)
}

/// Ends the job if the vacancy was not filled in time.
pub(super) fn expire_vacancy(own: &mut Coordinator, now: Time) {
    if vacancy_deadline(own).is_some_and(|deadline| deadline <= now)
        && let Some(vacancy) = own.vacancy.take()
    {
        own.end(now, vacancy.error);
    }
}
