//! A worker's part in checkpoints: what it keeps from servers, saved when it comes to the clock of an order.
//!
//! Servers have a table's version `t` when they have all gradients of iterations before `t`. What belongs to it is what this worker
//! keeps between its last push of an iteration before `t` and its first one of a later: residuals, updates that are held back, and
//! what its application noted.

use super::WorkerError;
use crate::checkpoint::{Request, SavedFile, WorkerArray, WorkerCut, is_name};
use crate::limits;
use crate::types::{Clock, WorkerId};
use crate::wire::control::sentence;
use crate::wire::{CheckpointOrder, CheckpointOutcome, Control};
use std::collections::BTreeMap;

/// The newest order, and how far it is carried out.
#[derive(Debug, Default)]
pub(super) struct Saving {
    order: Option<CheckpointOrder>,
    /// Nothing is copied for it yet, and may be.
    is_awaited: bool,
    /// What came of it; said again when the order is repeated after a broken connection.
    outcome: Option<CheckpointOutcome>,
    /// What the application wants saved, by name.
    notes: BTreeMap<String, Vec<u8>>,
}

/// A worker as an order finds it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Position {
    /// The iteration that it is at.
    pub(super) clock: Clock,
    /// A gradient of it was pushed, or is about to be.
    pub(super) has_begun: bool,
    /// Whether tables keep something from servers.
    pub(super) keeps_back: bool,
}

impl Saving {
    /// The application wants something saved: what it noted last under this name. Nothing removes the note.
    pub(super) fn note(&mut self, name: &str, bytes: &[u8]) -> Result<(), WorkerError> {
        let refuse = |why: String| Err(WorkerError::Order(why));
        let (most, longest) = (limits::MAX_NOTES, limits::MAX_NOTE_BYTES);
        if name.is_empty() || name.len() > limits::MAX_NAME_BYTES {
            return refuse(format!("a note has a name of 1 to {} bytes", limits::MAX_NAME_BYTES));
        }
        if bytes.len() > longest {
            return refuse(format!("note `{name}` has {} bytes, and may have {longest}", bytes.len()));
        }
        if bytes.is_empty() {
            self.notes.remove(name);
            return Ok(());
        }
        if self.notes.len() >= most && !self.notes.contains_key(name) {
            return refuse(format!("note `{name}` is one too many: a worker may have {most}"));
        }
        self.notes.insert(name.to_owned(), bytes.to_vec());
        Ok(())
    }

    /// Takes an order. What came of it, if that is known at once: one that was heard before is answered again, and a worker that has
    /// nothing to save is never too late.
    pub(super) fn follow(&mut self, order: CheckpointOrder, position: Position) -> Option<Control> {
        match &mut self.order {
            Some(known) if order.number < known.number => return None,
            Some(known) if order.number == known.number => {
                known.takes_all |= order.takes_all;
                return self.answer();
            }
            // The name is a peer's.
            _ if !is_name(&order.folder) => return None,
            _ => {}
        }
        self.outcome = if !position.keeps_back && self.notes.is_empty() {
            Some(CheckpointOutcome::Nothing)
        } else if position.clock > order.at || position.clock == order.at && position.has_begun {
            Some(CheckpointOutcome::Missed { version: position.clock })
        } else {
            None
        };
        self.is_awaited = self.outcome.is_none();
        self.order = Some(order);
        self.answer()
    }

    /// Whether what is kept has to be copied now, by a worker that is at this clock.
    pub(super) fn is_due(&self, clock: Clock) -> bool {
        let order = self.order.as_ref().filter(|_| self.is_awaited);
        order.is_some_and(|order| order.takes_all || clock >= order.at)
    }

    /// What tables keep is copied: the request that makes a file of it.
    pub(super) fn take(&mut self, job: &str, worker: WorkerId, arrays: Vec<WorkerArray>) -> Option<Request> {
        self.is_awaited = false;
        let order = self.order.as_ref()?;
        let cut = WorkerCut {
            folder: order.folder.clone(),
            job: job.to_owned(),
            clock: order.at,
            worker,
            arrays,
            notes: self.notes.clone(),
        };
        Some(Request::Pack { cut: Box::new(cut), is_kept: order.is_kept })
    }

    /// What tables keep could not be copied.
    pub(super) fn fail(&mut self, why: String) -> Option<Control> {
        self.is_awaited = false;
        self.outcome = Some(CheckpointOutcome::Failed { why: sentence(why) });
        self.answer()
    }

    /// A gradient of the order's clock, or of a later one, is pushed before what is kept could be copied.
    pub(super) fn miss(&mut self, clock: Clock) -> Option<Control> {
        self.is_awaited = false;
        self.outcome = Some(CheckpointOutcome::Missed { version: clock });
        self.answer()
    }

    /// The driver has made a file of what was copied, or could not. That of an earlier order counts for nothing.
    pub(super) fn note_packed(
        &mut self,
        folder: &str,
        file: Result<SavedFile, String>,
        clock: Clock,
    ) -> Option<Control> {
        self.order.as_ref().filter(|order| order.folder == folder)?;
        self.outcome = Some(match file {
            Ok(file) => CheckpointOutcome::Saved { file, version: clock },
            Err(why) => CheckpointOutcome::Failed { why: sentence(why) },
        });
        self.answer()
    }

    /// What came of the newest order, if that is known.
    fn answer(&self) -> Option<Control> {
        let (number, outcome) = (self.order.as_ref()?.number, self.outcome.clone()?);
        Some(Control::CheckpointTaken { number, outcome })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(number: u64, at: Clock) -> CheckpointOrder {
        let folder = crate::checkpoint::folder(at, 7, number);
        CheckpointOrder { number, at, folder, takes_all: false, is_kept: true, keep: vec![] }
    }

    fn outcome(message: Option<Control>) -> Option<(u64, CheckpointOutcome)> {
        match message? {
            Control::CheckpointTaken { number, outcome } => Some((number, outcome)),
            other => panic!("{other:?}"),
        }
    }

    const AT_3: Position = Position { clock: 3, has_begun: false, keeps_back: true };

    #[test]
    fn what_is_kept_is_copied_at_the_clock_that_was_ordered() {
        let mut saving = Saving::default();
        assert_eq!(saving.follow(order(1, 5), AT_3), None);
        assert_eq!([3, 4, 5, 6].map(|clock| saving.is_due(clock)), [false, false, true, true]);
        let Some(Request::Pack { cut, is_kept: true }) = saving.take("job", WorkerId(2), vec![]) else {
            panic!("it is packed")
        };
        assert_eq!((cut.clock, cut.worker, saving.is_due(6)), (5, WorkerId(2), false));
        assert_eq!(saving.note_packed("step-of-another", Err("late".into()), 6), None);
        let file = SavedFile { name: "worker-2.safetensors".into(), bytes: 1, digest: Default::default() };
        let saved = (1, CheckpointOutcome::Saved { file: file.clone(), version: 6 });
        assert_eq!(outcome(saving.note_packed(&cut.folder, Ok(file), 6)), Some(saved.clone()));
        // The coordinator may not have heard it.
        assert_eq!(outcome(saving.follow(order(1, 5), AT_3)), Some(saved));
        assert_eq!(saving.follow(order(0, 9), AT_3), None);
    }

    #[test]
    fn an_order_that_comes_too_late_is_refused_unless_there_is_nothing_to_save() {
        let mut saving = Saving::default();
        let late = Position { clock: 5, has_begun: true, keeps_back: true };
        let missed = |number| Some((number, CheckpointOutcome::Missed { version: 5 }));
        assert_eq!(outcome(saving.follow(order(1, 5), late)), missed(1));
        assert_eq!(saving.follow(order(2, 5), Position { has_begun: false, ..late }), None);
        assert!(saving.is_due(5));
        assert_eq!(outcome(saving.miss(5)), missed(2));
        let nothing = Position { keeps_back: false, ..late };
        assert_eq!(outcome(saving.follow(order(3, 5), nothing)), Some((3, CheckpointOutcome::Nothing)));
        saving.note("sampler", b"7").unwrap();
        assert_eq!(outcome(saving.follow(order(4, 5), nothing)), missed(4));
        saving.note("sampler", b"").unwrap();
        assert_eq!(outcome(saving.follow(order(5, 5), nothing)), Some((5, CheckpointOutcome::Nothing)));
    }

    #[test]
    fn a_worker_that_rounds_went_on_without_is_taken_as_it_is() {
        let mut saving = Saving::default();
        saving.follow(order(1, 50), AT_3);
        assert!(!saving.is_due(3));
        assert_eq!(saving.follow(CheckpointOrder { takes_all: true, ..order(1, 50) }, AT_3), None);
        assert!(saving.is_due(3));
        let failed = CheckpointOutcome::Failed { why: "there is no memory".into() };
        assert_eq!(outcome(saving.fail("there is no memory".into())), Some((1, failed)));
        assert!(!saving.is_due(3));
    }

    #[test]
    fn notes_have_bounds() {
        let mut saving = Saving::default();
        let long = "x".repeat(limits::MAX_NAME_BYTES + 1);
        for (name, bytes) in
            [("", vec![1]), (long.as_str(), vec![1]), ("n", vec![0; limits::MAX_NOTE_BYTES + 1])]
        {
            assert!(saving.note(name, &bytes).is_err());
        }
        (0..limits::MAX_NOTES).for_each(|at| saving.note(&at.to_string(), b"1").unwrap());
        assert!(saving.note("one more", b"1").is_err() && saving.note("0", b"2").is_ok());
    }
}
