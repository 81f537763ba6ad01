//! Aggregators as a shard sees them: each of them numbers its sums, and the lists of workers that are complete in them.
//!
//! After a broken connection an aggregator sends again what was not acknowledged. What was taken is skipped, so that every
//! sum is added once.

use crate::limits;
use crate::types::{AggregatorId, Clock, ProcessId, TableId};
use crate::wire::frame::{Completed, Sum};
use crate::wire::{Cause, Fault, Refusal};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The aggregators of a job.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Aggregators {
    peers: BTreeMap<AggregatorId, Peer>,
}

/// An aggregator as a shard remembers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Peer {
    process: ProcessId,
    /// Numbered frames up to this one were taken.
    taken: u64,
    /// Sums that were refused, until the aggregator tries again.
    refused: BTreeMap<(TableId, Clock), RefusedSum>,
}

/// Why a sum was refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RefusedSum {
    /// Which attempt at a push of this table and clock it was; all sums of it are refused alike.
    attempt: u32,
    fault: Fault,
}

impl RefusedSum {
    /// Whether the workers' progress counts all the same: other chunks of their gradients were taken.
    pub(crate) fn counts(&self) -> bool {
        self.fault.cause == Cause::NonFinite
    }

    /// The fault that the workers are told.
    pub(crate) fn fault(&self) -> &Fault {
        &self.fault
    }
}

/// Order of a numbered frame among those of its aggregator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It is the next one.
    Next,
    /// It was taken before.
    Again,
    /// This number is to come first. The sender is wrong, and waits for ever for its acknowledgement.
    TooEarly { next: u64 },
}

impl Aggregators {
    /// Whether there can be so many, and so much that they remember; the error says why not.
    pub(crate) fn check(&self) -> Result<(), String> {
        let fits = |(id, peer): (&AggregatorId, &Peer)| {
            id.0 < limits::MAX_AGGREGATORS && peer.refused.len() <= limits::MAX_REFUSED_SUMS
        };
        if self.peers.iter().all(fits) { Ok(()) } else { Err("there are too many aggregators".into()) }
    }

    /// Whether no aggregator has ever connected.
    pub(crate) fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    /// An aggregator connects. An aggregator's memory is lost with its process, so that a second one of the same number
    /// is refused.
    pub(crate) fn accept(
        &mut self,
        id: AggregatorId,
        process: ProcessId,
        incarnation: u64,
    ) -> Result<(), Refusal> {
        let fresh = || Peer { process, taken: 0, refused: BTreeMap::new() };
        let peer = self.peers.entry(id).or_insert_with(fresh);
        if peer.process != process || incarnation != process.0 {
            let reason = format!("{id} is another process, which held gradients; start the job anew");
            return Err(Refusal { reason, retry: false });
        }
        Ok(())
    }

    /// A numbered frame is here. It counts as taken if it is the next one.
    pub(crate) fn take_turn(&mut self, id: AggregatorId, number: u64) -> Turn {
        let Some(peer) = self.peers.get_mut(&id) else { return Turn::TooEarly { next: 1 } };
        let next = peer.taken.saturating_add(1);
        if number > next {
            return Turn::TooEarly { next };
        }
        if number < next {
            return Turn::Again;
        }
        peer.taken = next;
        Turn::Next
    }

    /// Whether a sum belongs to an attempt that was refused. Only an attempt that counts is taken in part.
    pub(crate) fn is_refused(&self, id: AggregatorId, sum: &Sum) -> bool {
        let key = (sum.subject.table, sum.clock);
        let refused = self.peers.get(&id).and_then(|peer| peer.refused.get(&key));
        refused.is_some_and(|refused| !refused.counts() && sum.attempt <= refused.attempt)
    }

    /// A sum was taken: an earlier attempt's refusal is over, unless workers have to hear of it.
    pub(crate) fn note_taken(&mut self, id: AggregatorId, sum: &Sum) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let key = (sum.subject.table, sum.clock);
        if peer.refused.get(&key).is_some_and(|refused| !refused.counts()) {
            peer.refused.remove(&key);
        }
    }

    /// A sum was refused: the workers that are complete in this attempt hear of it with their list.
    pub(crate) fn note_refused(
        &mut self,
        id: AggregatorId,
        of: (TableId, Clock),
        attempt: u32,
        fault: Fault,
    ) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.refused.insert(of, RefusedSum { attempt, fault });
        if peer.refused.len() > limits::MAX_REFUSED_SUMS {
            peer.refused.pop_first();
        }
    }

    /// Why the sums that a list completes were refused, if they were.
    pub(crate) fn refusal(&mut self, id: AggregatorId, list: &Completed) -> Option<RefusedSum> {
        let peer = self.peers.get_mut(&id)?;
        let key = (list.subject.table, list.clock);
        let refused = peer.refused.get(&key)?;
        if refused.counts() {
            return peer.refused.remove(&key);
        }
        (list.attempt <= refused.attempt).then(|| refused.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::frame::{Form, Subject};

    const ID: AggregatorId = AggregatorId(2);

    fn aggregators() -> Aggregators {
        let mut aggregators = Aggregators::default();
        aggregators.accept(ID, ProcessId(5), 5).unwrap();
        aggregators
    }

    fn subject() -> Subject {
        Subject { epoch: 1, table: TableId(0), request: 1 }
    }

    fn sum(attempt: u32) -> Sum {
        let subject = subject();
        Sum { subject, clock: 3, chunk: 0, attempt, gradients: 2, form: Form::PLAIN, has_absent: false }
    }

    fn list(attempt: u32) -> Completed {
        Completed { subject: subject(), clock: 3, attempt, last: None }
    }

    fn fault(cause: Cause) -> Fault {
        Fault { cause, message: "why".into() }
    }

    #[test]
    fn numbered_frames_are_taken_once_and_in_turn() {
        let mut aggregators = aggregators();
        assert_eq!(aggregators.take_turn(ID, 2), Turn::TooEarly { next: 1 });
        assert_eq!(
            [1, 2, 1, 2].map(|number| aggregators.take_turn(ID, number)),
            [Turn::Next, Turn::Next, Turn::Again, Turn::Again]
        );
        assert_eq!(aggregators.take_turn(ID, 4), Turn::TooEarly { next: 3 });
        // The numbers go on over connections; those of another process would not.
        assert!(
            aggregators.accept(ID, ProcessId(5), 5).is_ok()
                && aggregators.accept(ID, ProcessId(6), 6).is_err()
        );
        assert_eq!(aggregators.take_turn(ID, 3), Turn::Next);
    }

    #[test]
    fn a_refused_attempt_stays_refused_until_the_next_one() {
        let mut aggregators = aggregators();
        aggregators.note_refused(ID, (TableId(0), 3), 1, fault(Cause::TooFarAhead));
        assert!(aggregators.is_refused(ID, &sum(0)) && aggregators.is_refused(ID, &sum(1)));
        assert!(!aggregators.is_refused(ID, &sum(2)));
        for _ in 0..2 {
            let refusal = aggregators.refusal(ID, &list(1)).unwrap();
            assert_eq!((refusal.counts(), refusal.fault().cause), (false, Cause::TooFarAhead));
        }
        aggregators.note_taken(ID, &sum(2));
        assert!(aggregators.refusal(ID, &list(2)).is_none());
    }

    #[test]
    fn a_sum_with_nan_is_told_of_once_and_its_other_chunks_count() {
        let mut aggregators = aggregators();
        aggregators.note_refused(ID, (TableId(0), 3), 1, fault(Cause::NonFinite));
        assert!(!aggregators.is_refused(ID, &sum(1)));
        aggregators.note_taken(ID, &sum(1));
        assert!(aggregators.refusal(ID, &list(1)).is_some_and(|refusal| refusal.counts()));
        assert!(aggregators.refusal(ID, &list(1)).is_none());
    }

    #[test]
    fn refusals_take_memory_up_to_a_limit() {
        let mut aggregators = aggregators();
        for clock in 0..limits::MAX_REFUSED_SUMS as u64 + 5 {
            aggregators.note_refused(ID, (TableId(0), clock), 0, fault(Cause::Shape));
        }
        assert_eq!(aggregators.peers[&ID].refused.len(), limits::MAX_REFUSED_SUMS);
        assert!(!aggregators.is_refused(ID, &Sum { clock: 4, ..sum(0) }));
    }
}
