//! A shard's part in checkpoints: the order that it follows, and the plan that waits for what is read from one.

use super::cuts::CutOutcome;
use super::tables::Tables;
use crate::checkpoint::{Request, SavedFile, ShardCut, is_name};
use crate::role::Output;
use crate::types::{NodeId, ShardId};
use crate::wire::control::{frame, sentence};
use crate::wire::{CheckpointOrder, CheckpointOutcome, Control, Kind, Plan};

/// The newest order, and how far it is carried out.
#[derive(Debug, Default)]
pub(super) struct Checkpoints {
    order: Option<CheckpointOrder>,
    /// What came of it; said again when the order is repeated after a broken connection.
    outcome: Option<CheckpointOutcome>,
    restoring: Option<Restoring>,
}

/// A plan that this shard enters when the archive has brought what its tables held.
#[derive(Debug)]
struct Restoring {
    plan: Plan,
    /// A change of the plan came meanwhile.
    is_stale: bool,
}

impl Checkpoints {
    /// Takes an order: tables are copied at its version, or those that are left now. One that was heard before is answered again, if
    /// it is carried out.
    pub(super) fn follow(&mut self, order: CheckpointOrder, tables: &mut Tables) -> Option<Control> {
        match &mut self.order {
            Some(known) if order.number < known.number => None,
            Some(known) if order.number == known.number => {
                if order.takes_all && !std::mem::replace(&mut known.takes_all, true) {
                    tables.take_all_cuts();
                }
                self.answer()
            }
            // The name is a peer's.
            _ if !is_name(&order.folder) => None,
            _ => {
                tables.begin_cuts(order.at, order.takes_all);
                (self.order, self.outcome) = (Some(order), None);
                None
            }
        }
    }

    /// All tables are copied for a checkpoint, or cannot be.
    pub(super) fn end_cuts(&mut self, job: &str, shard: ShardId, tables: &mut Tables) -> Option<Output> {
        let (outcome, order) = (tables.poll_cuts()?, self.order.as_ref()?);
        self.outcome = Some(match outcome {
            CutOutcome::Made(tables) => {
                let (folder, job) = (order.folder.clone(), job.to_owned());
                let cut = Box::new(ShardCut { folder, job, clock: order.at, shard, tables });
                let request = Request::Write { cut, keep: order.keep.clone(), is_kept: order.is_kept };
                return Some(Output::Archive(Box::new(request)));
            }
            CutOutcome::Missed(version) => CheckpointOutcome::Missed { version },
            CutOutcome::Failed(why) => CheckpointOutcome::Failed { why },
        });
        let message = self.answer()?;
        Some(Output::send(NodeId::Coordinator, frame(Kind::Control, &message)))
    }

    /// A copy is written, or is not. That of an order which another one has replaced counts for nothing.
    pub(super) fn note_written(
        &mut self,
        folder: &str,
        file: Result<SavedFile, String>,
        tables: &Tables,
    ) -> Option<Control> {
        self.order.as_ref().filter(|order| order.folder == folder)?;
        self.outcome = Some(match file {
            Ok(file) => CheckpointOutcome::Saved { file, version: tables.newest_version() },
            Err(why) => CheckpointOutcome::Failed { why: sentence(why) },
        });
        self.answer()
    }

    /// What came of the newest order, if that is known.
    fn answer(&self) -> Option<Control> {
        let (number, outcome) = (self.order.as_ref()?.number, self.outcome.clone()?);
        Some(Control::CheckpointTaken { number, outcome })
    }

    /// Keeps a plan, and a newer one in its place, until what its tables held is here. False for a newer one.
    pub(super) fn keep_plan(&mut self, plan: Plan) -> bool {
        self.restoring.replace(Restoring { plan, is_stale: false }).is_none()
    }

    pub(super) fn is_restoring(&self) -> bool {
        self.restoring.is_some()
    }

    /// The plan that is kept is not the newest any more.
    pub(super) fn note_change(&mut self) {
        if let Some(restoring) = &mut self.restoring {
            restoring.is_stale = true;
        }
    }

    /// The plan that was kept, and whether a change of it has come since.
    pub(super) fn take_plan(&mut self) -> Option<(Plan, bool)> {
        self.restoring.take().map(|Restoring { plan, is_stale }| (plan, is_stale))
    }
}
