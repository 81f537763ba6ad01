//! Aggregators as a shard sees them: each of them numbers its sums, and the lists of workers that are complete in them.
//!
//! After a broken connection an aggregator sends again what was not acknowledged. What was taken is skipped, so that every
//! sum is added once. That holds within a *session*. Another process begins another one, and so does an aggregator whose sum cannot be
//! taken because a gradient in it came another way: it gives up what was not noted, and its workers send it again themselves
//! ([0026](../../../../docs/decisions/0026-aggregators-may-die.md)).

use crate::limits;
use crate::prng::Prng;
use crate::types::{AggregatorId, Clock, ProcessId, TableId, WorkerId};
use crate::wire::frame::{Completed, Sum};
use crate::wire::{Cause, Fault, Refusal};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The aggregators of a job.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Aggregators {
    peers: BTreeMap<AggregatorId, Peer>,
    /// Tells sessions apart from those of another process that was here before.
    seed: u64,
    sessions: u64,
}

/// An aggregator as a shard remembers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Peer {
    process: ProcessId,
    session: u64,
    is_connected: bool,
    /// Whose gradients are in its next sums.
    contributors: Arc<[WorkerId]>,
    /// Numbered frames up to this one were taken.
    taken: u64,
    /// Sums that were refused, until the aggregator tries again.
    refused: BTreeMap<(TableId, Clock), RefusedSum>,
}

impl Peer {
    /// Whether it is connected, and not this process.
    fn is_other(&self, process: ProcessId) -> bool {
        self.is_connected && self.process != process
    }
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

    /// For one that other processes may have come before.
    pub(crate) fn with_seed(seed: u64) -> Aggregators {
        Aggregators { seed, ..Aggregators::default() }
    }

    /// An aggregator connects. The number of its session.
    pub(crate) fn accept(
        &mut self,
        id: AggregatorId,
        process: ProcessId,
        incarnation: u64,
    ) -> Result<u64, Refusal> {
        let session = self.check_hello(id, process, incarnation)?;
        self.admit(id, process, session);
        Ok(session)
    }

    /// Whether an aggregator that says hello is welcome, and its session if it is.
    pub(crate) fn check_hello(
        &self,
        id: AggregatorId,
        process: ProcessId,
        incarnation: u64,
    ) -> Result<u64, Refusal> {
        let known = self.peers.get(&id);
        if incarnation != process.0 || known.is_some_and(|peer| peer.is_other(process)) {
            let reason = format!("another process is {id} here");
            return Err(Refusal { reason, retry: true });
        }
        let own = known.filter(|peer| peer.process == process);
        Ok(own.map_or_else(|| self.session(self.sessions + 1), |peer| peer.session))
    }

    /// An aggregator that was welcome is connected, in the session that it was told.
    pub(crate) fn admit(&mut self, id: AggregatorId, process: ProcessId, session: u64) {
        if let Some(peer) = self.peers.get_mut(&id).filter(|peer| peer.process == process) {
            peer.is_connected = true;
            return;
        }
        self.sessions += 1;
        let (contributors, refused) = (Arc::from([]), BTreeMap::new());
        let fresh = Peer { process, session, is_connected: true, contributors, taken: 0, refused };
        self.peers.insert(id, fresh);
    }

    /// The same when all connections are gone.
    pub(crate) fn disconnected(&self) -> Aggregators {
        let mut gone = self.clone();
        gone.peers.values_mut().for_each(|peer| peer.is_connected = false);
        gone
    }

    /// The connection to an aggregator is gone.
    pub(crate) fn lose(&mut self, id: AggregatorId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.is_connected = false;
        }
    }

    /// An aggregator is to give up what was not noted. Its connection is to be closed; what still comes on it is not taken.
    pub(crate) fn end_session(&mut self, id: AggregatorId) {
        let session = self.next_session();
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.session = session;
            peer.taken = 0;
            peer.contributors = Arc::from([]);
            peer.refused.clear();
            peer.is_connected = false;
        }
    }

    /// Nothing is known of any of them. Their sessions are others when they come back.
    pub(crate) fn forget_all(&mut self) {
        self.peers.clear();
    }

    fn next_session(&mut self) -> u64 {
        self.sessions += 1;
        self.session(self.sessions)
    }

    fn session(&self, number: u64) -> u64 {
        Prng::fork(self.seed, number).next_u64()
    }

    /// Whose gradients are in the next sums of an aggregator.
    pub(crate) fn set_contributors(&mut self, id: AggregatorId, workers: Vec<WorkerId>) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.contributors = workers.into();
        }
    }

    /// The same, as it was said last.
    pub(crate) fn contributors(&self, id: AggregatorId) -> Arc<[WorkerId]> {
        self.peers.get(&id).map_or_else(|| Arc::from([]), |peer| peer.contributors.clone())
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
        // The numbers go on over connections.
        aggregators.accept(ID, ProcessId(5), 5).unwrap();
        assert_eq!(aggregators.take_turn(ID, 3), Turn::Next);
    }

    #[test]
    fn another_process_begins_another_session_when_the_first_one_is_gone() {
        let mut aggregators = Aggregators::with_seed(7);
        let first = aggregators.accept(ID, ProcessId(5), 5).unwrap();
        assert_eq!(aggregators.take_turn(ID, 1), Turn::Next);
        assert!(aggregators.accept(ID, ProcessId(6), 6).is_err_and(|refusal| refusal.retry));
        aggregators.lose(ID);
        assert_eq!(aggregators.accept(ID, ProcessId(5), 5), Ok(first));
        aggregators.lose(ID);
        let second = aggregators.accept(ID, ProcessId(6), 6).unwrap();
        aggregators.set_contributors(ID, vec![WorkerId(3)]);
        aggregators.end_session(ID);
        let third = aggregators.accept(ID, ProcessId(6), 6).unwrap();
        assert!(first != second && second != third && first != third);
        assert_eq!((aggregators.take_turn(ID, 1), aggregators.contributors(ID).len()), (Turn::Next, 0));
        assert_ne!(Aggregators::with_seed(8).accept(ID, ProcessId(5), 5), Ok(first));
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
