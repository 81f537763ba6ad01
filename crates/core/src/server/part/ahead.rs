//! Answers that are sent chunk by chunk, ahead of the decision that completes them.
//!
//! Where a round waits for all workers, a chunk that has all its gradients has its final values long before the round
//! closes. Those who pushed with a wish for the parameters get it at once: links carry both ways all the time, and the
//! chunk is sent while it is in the cache. The last chunk of an answer waits for the consistency controller, so that
//! nothing is complete before its time.

use crate::store::Place;
use crate::types::{Clock, WorkerId};
use crate::wire::frame::Push;

/// An answer that has begun, or will.
#[derive(Debug)]
pub(in crate::server) struct Ahead {
    pub(in crate::server) worker: WorkerId,
    pub(in crate::server) request: u64,
    pub(in crate::server) landing: Option<Place>,
    /// The clock of the push.
    pushed: Clock,
    /// Chunks of it that were sent, from the first on.
    sent: usize,
}

/// The answers of a table that may be ahead: at most one for each worker.
#[derive(Debug, Default)]
pub(in crate::server) struct AnswersAhead {
    answers: Vec<Ahead>,
}

impl AnswersAhead {
    /// A worker pushes, and wants the parameters that follow.
    pub(super) fn begin(&mut self, worker: WorkerId, push: &Push) {
        self.forget(worker);
        let landing = push.reply_place;
        let (request, pushed) = (push.subject.request, push.clock);
        self.answers.push(Ahead { worker, request, landing, pushed, sent: 0 });
    }

    /// Calls `send` with every answer to a push of this round that the chunk of this place is next of. It says whether
    /// it was sent.
    pub(in crate::server) fn send_next(
        &mut self,
        round: Clock,
        index: usize,
        mut send: impl FnMut(&Ahead) -> bool,
    ) {
        for answer in &mut self.answers {
            if answer.pushed == round && answer.sent == index && send(answer) {
                answer.sent += 1;
            }
        }
    }

    /// An answer is completed now: how many of its chunks were sent already.
    pub(in crate::server) fn take(&mut self, worker: WorkerId, request: u64) -> usize {
        let is_it = |answer: &Ahead| answer.worker == worker && answer.request == request;
        let found = self.answers.iter().position(is_it);
        found.map_or(0, |place| self.answers.swap_remove(place).sent)
    }

    /// What was sent to a worker is lost, or of no use to it.
    pub(in crate::server) fn forget(&mut self, worker: WorkerId) {
        self.answers.retain(|answer| answer.worker != worker);
    }
}
