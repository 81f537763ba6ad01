//! The connection of an aggregator to one shard, and the workers' requests on it.

use super::aggregate::AggregateId;
use super::members::{Caller, Members};
use super::routes::{Route, Routes};
use crate::limits;
use crate::link::Link;
use crate::role::{Body, Frame, Level, Outbox, Output};
use crate::status::AggregatorReport;
use crate::store::Place;
use crate::types::{Clock, ConnectionId, ShardId, TableId};
use crate::wire::control::{self, frame};
use crate::wire::frame::{FromAggregator, FromWorker, Pull, Subject};
use crate::wire::{Cause, Fault, Header, Kind, ack};

/// Outputs, and counts of what is moved.
#[derive(Debug)]
pub(super) struct Out<'a> {
    pub(super) outputs: &'a mut Outbox,
    pub(super) report: &'a mut AggregatorReport,
}

impl Out<'_> {
    pub(super) fn send(&mut self, to: ConnectionId, header: Header, body: Body) {
        self.outputs.push_back(Output::send(to, Frame { header, body }));
    }

    pub(super) fn log(&mut self, line: String) {
        self.outputs.push_back(Output::Log(Level::Warn, control::sentence(line)));
    }
}

/// One shard, and the requests that workers have put to it through here.
#[derive(Debug)]
pub(super) struct Uplink {
    shard: ShardId,
    /// The connection to it, or to the aggregator above.
    connection: ConnectionId,
    pub(super) link: Link,
    pub(super) routes: Routes,
    /// Requests that a worker may have under way.
    most_requests: usize,
}

/// A push that is complete in an aggregate, as a request to the shard.
#[derive(Debug, Clone, Copy)]
pub(super) struct CompletePush {
    pub(super) caller: Caller,
    pub(super) table: usize,
    /// [`Plan::valid_from`](crate::wire::Plan::valid_from) of the table.
    pub(super) epoch: u32,
    pub(super) clock: Clock,
    pub(super) request: u64,
    pub(super) want_params: bool,
    pub(super) reply_place: Option<Place>,
}

impl Uplink {
    pub(super) fn new(shard: ShardId, connection: ConnectionId, link: Link, tables: usize) -> Uplink {
        let most_requests = limits::MAX_PASSED_REQUESTS + tables;
        Uplink { shard, connection, link, routes: Routes::default(), most_requests }
    }

    pub(super) fn shard(&self) -> ShardId {
        self.shard
    }

    /// The connection to the shard, or to the aggregator above.
    pub(super) fn connection(&self) -> ConnectionId {
        self.connection
    }

    /// The connection for this shard on which a worker is answered.
    pub(super) fn connection_of(&self, Caller { worker, through }: Caller) -> ConnectionId {
        match through {
            None => ConnectionId::WorkerFor(worker, self.shard),
            Some(id) => ConnectionId::LowerFor(id, self.shard),
        }
    }

    /// A route for a push that is complete in an aggregate.
    pub(super) fn open(&mut self, push: CompletePush, aggregate: AggregateId) -> u64 {
        let CompletePush { caller, table, epoch, clock, request, want_params, reply_place } = push;
        self.routes.open(Route {
            worker: caller.worker,
            through: caller.through,
            table,
            clock,
            request,
            epoch,
            aggregate: Some(aggregate),
            is_push: false,
            awaits_ack: true,
            awaits_params: want_params,
            bytes: 0,
            reply_place,
            hold: None,
        })
    }

    /// Puts a worker's request to the shard in its name. The payloads of one request have at most `longest` bytes.
    pub(super) fn relay(
        &mut self,
        caller: Caller,
        frame: FromWorker,
        payload: &[u8],
        longest: usize,
        out: &mut Out<'_>,
    ) -> Result<(), Fault> {
        let request = self.route(caller, &frame, payload.len(), longest)?;
        let number = |subject: Subject| Subject { request, ..subject };
        let own = match frame {
            FromWorker::Init(mut init) => {
                init.subject = number(init.subject);
                FromWorker::Init(init)
            }
            FromWorker::Push(mut push) => {
                push.subject = number(push.subject);
                out.report.bytes_to_servers += payload.len() as u64;
                FromWorker::Push(push)
            }
            FromWorker::Pull(mut pull) => {
                pull.subject = number(pull.subject);
                FromWorker::Pull(pull)
            }
        };
        let header = FromAggregator::Relayed(caller.worker, own).header(payload.len());
        let body = if payload.is_empty() { Body::Empty } else { Body::Bytes(payload.to_vec()) };
        out.send(self.connection, header, body);
        Ok(())
    }

    /// The number that the shard knows a worker's request by.
    fn route(
        &mut self,
        Caller { worker, through }: Caller,
        frame: &FromWorker,
        bytes: usize,
        longest: usize,
    ) -> Result<u64, Fault> {
        let Subject { table, request, epoch } = *frame.subject();
        let table = table.0 as usize;
        let (clock, is_push, is_pull, wants, reply_place) = match frame {
            FromWorker::Init(_) => (0, false, false, false, None),
            FromWorker::Push(push) => (push.clock, true, false, push.want_params, push.reply_place),
            FromWorker::Pull(pull) => (pull.clock, false, true, true, pull.reply_place),
        };
        let stale = self.routes.passed(worker, request).filter(|(_, route)| route.epoch != epoch);
        if let Some((number, _)) = stale {
            self.routes.close(number);
        }
        if let Some((number, route)) = self.routes.passed(worker, request) {
            route.awaits_params |= wants;
            route.bytes += bytes;
            if route.bytes <= longest || is_pull {
                return Ok(number);
            }
            self.routes.close(number);
            let message = format!("{worker} sends more than table {table} can take, under one request");
            return Err(Fault { cause: Cause::Protocol, message });
        }
        let limit = self.most_requests;
        if self.routes.has_many(worker, limit) {
            let message = format!("{worker} has {limit} requests under way here; wait for them first");
            return Err(Fault { cause: Cause::TooFarAhead, message });
        }
        Ok(self.routes.open(Route {
            worker,
            through,
            table,
            clock,
            request,
            epoch,
            aggregate: None,
            is_push,
            awaits_ack: !is_pull,
            awaits_params: wants,
            bytes,
            reply_place,
            hold: None,
        }))
    }
}

/// Both sides of an aggregator, as far as one shard goes: its workers and the shard.
#[derive(Debug)]
pub(super) struct Peers<'a, 'b> {
    pub(super) members: &'a Members,
    pub(super) uplink: &'a mut Uplink,
    pub(super) out: &'a mut Out<'b>,
}

impl Peers<'_, '_> {
    pub(super) fn refuse(&mut self, caller: Caller, table: TableId, request: u64, fault: &Fault) {
        let mut frame = frame(Kind::Error, fault);
        frame.header.table = table;
        frame.header.request = request;
        self.out.send(self.uplink.connection_of(caller), frame.header, frame.body);
    }

    pub(super) fn acknowledge(&mut self, caller: Caller, request: u64) {
        self.acknowledge_on(self.uplink.connection_of(caller), &[request]);
    }

    /// Acknowledges requests of one connection.
    pub(super) fn acknowledge_on(&mut self, connection: ConnectionId, requests: &[u64]) {
        for requests in requests.chunks(ack::MAX_REQUESTS) {
            let Frame { header, body } = ack::frame(requests);
            self.out.send(connection, header, body);
        }
    }

    /// Tells a worker that the shard has its push, and asks for the parameters that it wants. Where they are to lie was said
    /// with the first attempt; they come as bytes.
    pub(super) fn settle_again(&mut self, push: CompletePush) {
        let CompletePush { caller, clock, request, want_params, .. } = push;
        self.acknowledge(caller, request);
        if !want_params {
            return;
        }
        let subject = Subject { epoch: push.epoch, table: TableId(push.table as u32), request };
        let clock = clock.saturating_add(1);
        let pull = Pull { subject, clock, rows: None, now: false, reply_place: None };
        if let Err(fault) = self.uplink.relay(caller, FromWorker::Pull(pull), &[], 0, self.out) {
            self.refuse(caller, subject.table, request, &fault);
        }
    }
}
