//! Aggregators as a shard sees them: sums of several workers' gradients come in, and answers go to several workers.
//!
//! Sums and the lists of workers that are complete in them are numbered by each aggregator. After a broken connection
//! it sends again what was not acknowledged; what was taken is skipped, so that every sum is added once. Everything
//! else comes from an aggregator in a worker's name, and is handled as if that worker had sent it.

use super::Shard;
use super::pulls::PendingPull;
use crate::consistency::Apply;
use crate::limits;
use crate::role::{Body, Frame, Output};
use crate::types::{AggregatorId, Clock, NodeId, TableId, Time, WorkerId};
use crate::wire::frame::FromAggregator;
use crate::wire::{Cause, DType, Fault, Header, Hello, Kind, Refusal, Welcome, group};
use std::collections::BTreeMap;

/// The aggregators of a job, and who goes through them.
#[derive(Debug, Default)]
pub(super) struct Groups {
    peers: BTreeMap<AggregatorId, Peer>,
    routes: BTreeMap<WorkerId, AggregatorId>,
}

/// What is remembered of one aggregator.
#[derive(Debug)]
struct Peer {
    process: u64,
    /// Numbered frames up to this one were taken.
    taken: u64,
    /// Sums that were refused, until the aggregator tries again.
    refused: BTreeMap<(TableId, Clock), Refused>,
    /// The last answer that was sent in full on this connection, by table.
    sent: BTreeMap<usize, Sent>,
}

#[derive(Debug)]
struct Refused {
    /// Which attempt at a push of this table and clock it was; all sums of it are refused alike.
    attempt: u32,
    fault: Fault,
}

impl Refused {
    /// Whether the workers' progress counts all the same: other chunks of their gradients were taken.
    fn counts(&self) -> bool {
        self.fault.cause == Cause::NonFinite
    }
}

/// Parameters as they were when they were last sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sent {
    version: Clock,
    /// Where gradients are steps of their own, parameters change without a version: a count of what came since.
    pushed: u64,
    number: u32,
    /// Parameters have not changed otherwise since.
    is_current: bool,
}

/// Which answer to an aggregator this is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Edition {
    pub(super) number: u32,
    /// The aggregator has it.
    pub(super) is_same: bool,
}

impl Groups {
    /// Whom answers to a worker are sent to.
    pub(super) fn address(&self, worker: WorkerId) -> NodeId {
        self.routes.get(&worker).map_or(NodeId::Worker(worker), |&id| NodeId::Aggregator(id))
    }

    /// Whether a worker talks to this shard itself.
    pub(super) fn is_direct(&self, worker: WorkerId) -> bool {
        !self.routes.contains_key(&worker)
    }

    /// The worker talks to this shard itself, or is gone.
    pub(super) fn leave(&mut self, worker: WorkerId) {
        self.routes.remove(&worker);
    }

    /// Parameters may have changed without a new version: the next answer is an edition of its own. Editions are counted
    /// on, since an aggregator takes one that is behind its last for old.
    pub(super) fn outdate_sent(&mut self) {
        let all = self.peers.values_mut().flat_map(|peer| peer.sent.values_mut());
        all.for_each(|sent| sent.is_current = false);
    }
}

impl Shard {
    pub(super) fn accept_aggregator(
        &mut self,
        hello: &Hello,
        process: u64,
        id: Option<AggregatorId>,
    ) -> Result<Welcome, Refusal> {
        let refuse = |reason: String, retry| Err(Refusal { reason, retry });
        let Some(id) = id.filter(|id| id.0 < limits::MAX_AGGREGATORS) else {
            return refuse("an aggregator gets its number from the coordinator first".into(), false);
        };
        if self.plan.is_none() {
            return refuse("this server has no plan yet".into(), true);
        }
        let fresh = || Peer { process, taken: 0, refused: BTreeMap::new(), sent: BTreeMap::new() };
        let peer = self.groups.peers.entry(id).or_insert_with(fresh);
        if peer.process != process || hello.incarnation != process {
            return refuse(
                format!("{id} is another process, which held gradients; start the job anew"),
                false,
            );
        }
        Ok(Welcome { you: NodeId::Aggregator(id), incarnation: process })
    }

    pub(super) fn handle_aggregator_frame(
        &mut self,
        now: Time,
        id: AggregatorId,
        header: &Header,
        payload: &[u8],
    ) {
        let Some(worker) = header.spoken_for() else {
            return match header.kind {
                Kind::Push => self.take_sum(id, header, payload),
                Kind::Group => self.take_group(now, id, header, payload),
                kind => self.outputs.push_back(Output::Log(format!("ignored a {kind:?} frame from {id}"))),
            };
        };
        if header.kind == Kind::Forget {
            return self.cancel_pulls(worker);
        }
        if self.incarnation(worker).is_none() {
            let fault = not_a_member(worker);
            return self.refuse_to(NodeId::Aggregator(id), header.table, header.request, &fault);
        }
        self.groups.routes.insert(worker, id);
        // Its place in the aggregator's memory is nobody's business here.
        let own = Header { landing: 0, ..*header };
        self.handle_worker_frame(now, worker, &own, payload);
    }

    /// The connection to an aggregator is gone, and the pulls of its workers with it.
    pub(super) fn lose_aggregator(&mut self, id: AggregatorId) {
        let through = |(&worker, &via): (&WorkerId, &AggregatorId)| (via == id).then_some(worker);
        let workers: Vec<WorkerId> = self.groups.routes.iter().filter_map(through).collect();
        workers.into_iter().for_each(|worker| self.cancel_pulls(worker));
        if let Some(peer) = self.groups.peers.get_mut(&id) {
            peer.sent.clear();
        }
        self.tables.iter_mut().for_each(|table| table.forget_answers_to(id));
    }

    /// Which answer to an aggregator this one is; `None` when it goes to the worker itself.
    pub(super) fn edition(&mut self, pull: &PendingPull) -> Option<Edition> {
        let NodeId::Aggregator(id) = self.groups.address(pull.worker) else { return None };
        let controller = &self.tables[pull.table].controller;
        let pushed = match controller.policy().model.apply() {
            Apply::OnArrival => self.bytes_pushed,
            Apply::OnRound => 0,
        };
        let version = controller.state().v_train();
        let sent = &mut self.groups.peers.get_mut(&id)?.sent;
        let last = sent.get(&pull.table).copied();
        if let Some(last) =
            last.filter(|last| last.is_current && (last.version, last.pushed) == (version, pushed))
        {
            return Some(Edition { number: last.number, is_same: true });
        }
        let number = last.map_or(1, |last| last.number.wrapping_add(1).max(1));
        sent.insert(pull.table, Sent { version, pushed, number, is_current: true });
        Some(Edition { number, is_same: false })
    }

    /// A sum of gradients of one chunk.
    fn take_sum(&mut self, id: AggregatorId, header: &Header, payload: &[u8]) {
        if !self.is_next(id, header) {
            return;
        }
        self.bytes_pushed += payload.len() as u64;
        let key = (header.table, header.clock);
        let stands = |refused: &Refused| !refused.counts() && header.part <= refused.attempt;
        if self.groups.peers.get(&id).and_then(|peer| peer.refused.get(&key)).is_some_and(stands) {
            return;
        }
        let taken = match (self.check_sum(header), FromAggregator::decode(header)) {
            (Ok(table), Some(FromAggregator::Sum(sum))) => {
                self.tables[table].push_sum(id, &sum, payload, &mut self.accumulators)
            }
            (Ok(table), _) => {
                Err(Fault { cause: Cause::Shape, message: format!("table {table}: a sum of rows") })
            }
            (Err(fault), _) => Err(fault),
        };
        let Some(peer) = self.groups.peers.get_mut(&id) else { return };
        match taken {
            Ok(()) if peer.refused.get(&key).is_some_and(|refused| !refused.counts()) => {
                peer.refused.remove(&key);
            }
            Ok(()) => {}
            Err(fault) => {
                self.refused += 1;
                peer.refused.insert(key, Refused { attempt: header.part, fault });
                if peer.refused.len() > limits::MAX_REFUSED_SUMS {
                    peer.refused.pop_first();
                }
            }
        }
    }

    /// Whether a numbered frame is the next one. One that was taken is sent again after a broken connection; one that is
    /// ahead of its turn is a bug of the sender, which waits for ever for its acknowledgement.
    fn is_next(&mut self, id: AggregatorId, header: &Header) -> bool {
        let Some(peer) = self.groups.peers.get_mut(&id) else { return false };
        let next = peer.taken.saturating_add(1);
        if header.request == next {
            peer.taken = next;
            return true;
        }
        if header.request > next {
            let line = format!("{id} sent frame {} of its sums before frame {next}", header.request);
            self.outputs.push_back(Output::Log(line));
        }
        false
    }

    /// What a sum's frame must fulfil, whoever is in it.
    fn check_sum(&self, header: &Header) -> Result<usize, Fault> {
        let fault = |cause, message| Err(Fault { cause, message });
        let epoch = self.plan.as_ref().map_or(0, |plan| plan.epoch);
        if header.epoch != epoch {
            let message = format!("the sum is of placement epoch {}, the job is in {epoch}", header.epoch);
            return fault(Cause::StaleEpoch, message);
        }
        let table = header.table.0 as usize;
        if self.tables.get(table).is_none_or(|part| part.elements() == 0) {
            return fault(Cause::Shape, format!("nothing of table {table} is on this server"));
        }
        if header.dtype != DType::F32 {
            return fault(Cause::Shape, format!("a sum of {:?}; sums are f32", header.dtype));
        }
        Ok(table)
    }

    /// Some workers' pushes are complete in the sums before: they count, and are followed by the pulls they ask for.
    fn take_group(&mut self, now: Time, id: AggregatorId, header: &Header, payload: &[u8]) {
        let is_fresh = self.is_next(id, header);
        let Some(peer) = self.groups.peers.get_mut(&id) else { return };
        if header.request > peer.taken {
            return;
        }
        let refused = match peer.refused.get(&(header.table, header.clock)) {
            Some(refused) if refused.counts() => peer.refused.remove(&(header.table, header.clock)),
            Some(Refused { attempt, fault }) if header.part <= *attempt => {
                Some(Refused { attempt: *attempt, fault: fault.clone() })
            }
            _ => None,
        };
        let entries = match group::decode(payload) {
            Ok(entries) => entries,
            Err(error) => {
                self.outputs.push_back(Output::Log(format!("{id}: {error}")));
                Vec::new()
            }
        };
        let counts = is_fresh && refused.as_ref().is_none_or(Refused::counts);
        let table = self.check_sum(header);
        for entry in &entries {
            let worker = entry.worker;
            let fault = match (&table, &refused) {
                _ if self.incarnation(worker).is_none() => Some(not_a_member(worker)),
                (Err(fault), _) => Some(fault.clone()),
                (Ok(_), refused) => refused.as_ref().map(|refused| refused.fault.clone()),
            };
            if let Some(fault) = fault {
                self.refuse_to(NodeId::Aggregator(id), header.table, entry.request, &fault);
            }
            if let (Ok(table), true) = (&table, counts && self.incarnation(worker).is_some()) {
                self.groups.routes.insert(worker, id);
                self.tables[*table].count_push(now, worker, header.clock);
            }
        }
        self.note_group(id, header);
        let Ok(table) = table else { return };
        self.settle(now, table);
        if refused.is_some() {
            return;
        }
        for entry in entries.iter().filter(|entry| entry.want_params) {
            if self.incarnation(entry.worker).is_none() {
                continue;
            }
            self.groups.routes.insert(entry.worker, id);
            let (worker, request, clock) = (entry.worker, entry.request, header.clock.saturating_add(1));
            let pull =
                PendingPull { worker, table, request, clock, landing: None, rows: None, owes_ack: false };
            if let Err(fault) = self.ask(now, pull) {
                self.refuse(worker, header.table, request, &fault);
            }
        }
    }

    /// Everything up to this frame is taken: the aggregator may forget it.
    fn note_group(&mut self, id: AggregatorId, header: &Header) {
        let mut note = Header::new(Kind::Group);
        note.table = header.table;
        note.clock = header.clock;
        note.request = header.request;
        note.epoch = header.epoch;
        let frame = Frame { header: note, body: Body::Empty };
        self.outputs.push_back(Output::Send { to: NodeId::Aggregator(id), frame });
    }
}

fn not_a_member(worker: WorkerId) -> Fault {
    Fault { cause: Cause::NotAMember, message: format!("{worker} is no member of this job any more") }
}
