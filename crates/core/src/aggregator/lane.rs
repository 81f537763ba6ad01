//! What goes on between the workers of an aggregator and one shard.
//!
//! Requests that are not added up are passed on one by one in the worker's name, under numbers of the aggregator.
//! Nothing of them is kept: when the connection to the shard breaks, the workers' connections are closed too, and they
//! send again what was not answered. How gradients are added up is in `sums.rs`.

use super::copies::{Copies, Unfit};
use super::routes::{Route, Routes};
use super::sums::Flights;
use super::table::Table;
use crate::limits;
use crate::link::Link;
use crate::role::{Body, Frame, Outbox, Output};
use crate::status::AggregatorReport;
use crate::store::Place;
use crate::types::{Clock, NodeId, ShardId, TableId, Time, WorkerId};
use crate::wire::ack;
use crate::wire::control::{self, frame};
use crate::wire::{Cause, Fault, Flags, Header, Kind};
use std::collections::BTreeMap;

/// One shard, as the workers of an aggregator see it through it.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) shard: ShardId,
    pub(super) link: Link,
    pub(super) tables: Vec<Table>,
    /// Live workers that came here, and whether they are connected.
    pub(super) members: BTreeMap<WorkerId, bool>,
    pub(super) routes: Routes,
    pub(super) flights: Flights,
    /// Answers that are the same as one which is not here yet: it was overtaken.
    ahead: Vec<Ahead>,
}

#[derive(Debug)]
struct Ahead {
    table: usize,
    clock: Clock,
    edition: u32,
    number: u64,
}

/// Where a lane says what is to be done, and counts what it moves.
#[derive(Debug)]
pub(super) struct Out<'a> {
    pub(super) outputs: &'a mut Outbox,
    pub(super) report: &'a mut AggregatorReport,
}

impl Out<'_> {
    pub(super) fn send(&mut self, to: NodeId, header: Header, body: Body) {
        self.outputs.push_back(Output::Send { to, frame: Frame { header, body } });
    }

    pub(super) fn log(&mut self, line: String) {
        self.outputs.push_back(Output::Log(control::sentence(line)));
    }
}

impl Lane {
    pub(super) fn new(shard: ShardId, link: Link, tables: Vec<Table>, first_sum: u64) -> Lane {
        Lane {
            shard,
            link,
            tables,
            members: BTreeMap::new(),
            routes: Routes::default(),
            flights: Flights::new(first_sum),
            ahead: Vec::new(),
        }
    }

    /// A worker says hello. The error says why it cannot be served, and whether that may change.
    pub(super) fn accept(&mut self, worker: WorkerId, again: bool) -> Result<(), (String, bool)> {
        let shard = self.shard;
        if again && !self.members.contains_key(&worker) {
            let why = format!(
                "this aggregator was started anew, and what it held of {worker} for {shard} is lost; start the job anew"
            );
            return Err((why, false));
        }
        if !self.link.is_up() {
            return Err((format!("{shard} is not connected to this aggregator"), true));
        }
        self.members.insert(worker, true);
        Ok(())
    }

    pub(super) fn is_connected(&self, worker: WorkerId) -> bool {
        self.members.get(&worker) == Some(&true)
    }

    /// A worker's connection is gone. It will ask again for what it still wants.
    pub(super) fn lose_member(&mut self, worker: WorkerId, out: &mut Out<'_>) {
        let Some(connected @ true) = self.members.get_mut(&worker) else { return };
        *connected = false;
        self.routes.close_all_of(worker);
        let mut header = Header::new(Kind::Forget);
        header.speak_for(worker);
        out.send(NodeId::Shard(self.shard), header, Body::Empty);
    }

    /// A worker is gone for good: nobody waits for it any more.
    pub(super) fn remove_member(&mut self, worker: WorkerId, out: &mut Out<'_>) {
        self.lose_member(worker, out);
        self.members.remove(&worker);
        for number in 0..self.tables.len() {
            self.remove_pusher(number, worker, out);
        }
    }

    /// The shard can be reached (again).
    pub(super) fn connected(&mut self, out: &mut Out<'_>) {
        self.link.connected();
        self.send_flights(out);
    }

    /// The connection to the shard is gone. What was passed on may be lost with it: the workers send it again.
    pub(super) fn disconnected(&mut self, copies: &mut Copies, out: &mut Out<'_>) {
        self.routes.clear();
        self.ahead.clear();
        copies.forget_editions(self.shard);
        let shard = self.shard;
        for (&worker, connected) in self.members.iter_mut().filter(|(_, connected)| **connected) {
            *connected = false;
            out.outputs.push_back(Output::Disconnect { peer: NodeId::Through(worker, shard) });
        }
    }

    pub(super) fn handle_worker(
        &mut self,
        now: Time,
        worker: WorkerId,
        header: &Header,
        payload: &[u8],
        out: &mut Out<'_>,
    ) {
        let result = match header.kind {
            Kind::Push => {
                out.report.bytes_from_workers += payload.len() as u64;
                match self.file_push(worker, header) {
                    Ok(true) => self.push(now, worker, header, payload, out),
                    Ok(false) => self.pass_on(worker, header, payload, out),
                    Err(fault) => Err(fault),
                }
            }
            Kind::Init | Kind::Pull => self.pass_on(worker, header, payload, out),
            other => {
                let message = format!("an aggregator does not take {other:?} frames from a worker");
                Err(Fault { cause: Cause::Protocol, message })
            }
        };
        if let Err(fault) = result {
            self.refuse(worker, header.table, header.request, &fault, out);
        }
    }

    /// Puts a worker's request to the shard in its name.
    pub(super) fn pass_on(
        &mut self,
        worker: WorkerId,
        header: &Header,
        payload: &[u8],
        out: &mut Out<'_>,
    ) -> Result<(), Fault> {
        let number = self.route(worker, header, payload.len())?;
        let mut own = Header { request: number, ..*header };
        own.speak_for(worker);
        if header.kind == Kind::Push {
            out.report.bytes_to_servers += payload.len() as u64;
        }
        let body = if payload.is_empty() { Body::Empty } else { Body::Bytes(payload.to_vec()) };
        out.send(NodeId::Shard(self.shard), own, body);
        Ok(())
    }

    /// The number that the shard knows a worker's request by.
    fn route(&mut self, worker: WorkerId, header: &Header, bytes: usize) -> Result<u64, Fault> {
        let table = header.table.0 as usize;
        // A row and its number for each element would be the longest that anybody has to say of a table at once.
        let longest = limits::MAX_DATA_BYTES + self.tables.get(table).map_or(0, |table| table.elements() * 8);
        let wants = header.kind == Kind::Pull || header.flags.has(Flags::WANT_PARAMS);
        if let Some((number, route)) = self.routes.passed(worker, header.request) {
            route.awaits_params |= wants;
            route.bytes += bytes;
            if route.bytes <= longest || header.kind == Kind::Pull {
                return Ok(number);
            }
            self.routes.close(number);
            let message = format!("{worker} sends more than table {table} can take, under one request");
            return Err(Fault { cause: Cause::Protocol, message });
        }
        let limit = limits::MAX_PASSED_REQUESTS + self.tables.len();
        if self.routes.has_many(worker, limit) {
            let message = format!("{worker} has {limit} requests under way here; wait for them first");
            return Err(Fault { cause: Cause::TooFarAhead, message });
        }
        Ok(self.routes.open(Route {
            worker,
            table,
            clock: header.clock,
            request: header.request,
            sum: None,
            is_push: header.kind == Kind::Push,
            awaits_ack: header.kind != Kind::Pull,
            awaits_params: wants,
            bytes,
            landing: header.landing,
        }))
    }

    pub(super) fn refuse(
        &self,
        worker: WorkerId,
        table: TableId,
        request: u64,
        fault: &Fault,
        out: &mut Out<'_>,
    ) {
        let mut frame = frame(Kind::Error, fault);
        frame.header.table = table;
        frame.header.request = request;
        out.send(self.through(worker), frame.header, frame.body);
    }

    pub(super) fn acknowledge(&self, route: &Route, out: &mut Out<'_>) {
        let Frame { header, body } = ack::frame(&[route.request]);
        out.send(self.through(route.worker), header, body);
    }

    /// What the shard says. The error ends the aggregator.
    pub(super) fn handle_shard(
        &mut self,
        header: &Header,
        payload: &[u8],
        copies: &mut Copies,
        out: &mut Out<'_>,
    ) -> Result<(), String> {
        match header.kind {
            Kind::Group => self.noted(header.request, out),
            Kind::PushAck => match ack::requests(header, payload) {
                Ok(requests) => {
                    for request in requests {
                        if let Some(route) = self.routes.acknowledge(request) {
                            self.note_passed(&route, true);
                            self.acknowledge(&route, out);
                        }
                    }
                }
                Err(error) => out.log(error.to_string()),
            },
            Kind::Params => return self.take_params(header, payload, copies, out),
            Kind::Error => match control::decode::<Fault>("error", payload) {
                Ok(fault) => self.take_fault(header, fault, out),
                Err(error) => out.log(error.to_string()),
            },
            other => out.log(format!("ignored a {other:?} frame from {}", self.shard)),
        }
        Ok(())
    }

    /// The shard refuses a request: whoever made it is told why.
    fn take_fault(&mut self, header: &Header, mut fault: Fault, out: &mut Out<'_>) {
        fault.message = control::sentence(fault.message);
        let Some(route) = self.routes.close(header.request) else { return };
        self.refuse(route.worker, TableId(route.table as u32), route.request, &fault, out);
        match route.sum {
            None => self.note_passed(&route, false),
            Some(sum) => self.take_back(sum, route.worker, &fault, out),
        }
    }

    fn take_params(
        &mut self,
        header: &Header,
        payload: &[u8],
        copies: &mut Copies,
        out: &mut Out<'_>,
    ) -> Result<(), String> {
        let table = header.table.0 as usize;
        if self.tables.get(table).is_none_or(|table| table.is_empty()) {
            out.log(format!("{} sent parameters that it does not hold", self.shard));
            return Ok(());
        }
        out.report.bytes_from_servers += payload.len() as u64;
        if header.flags.has(Flags::SAME) {
            let ahead = Ahead { table, clock: header.clock, edition: header.rows, number: header.request };
            // Each is the answer to somebody's pull.
            if self.ahead.len() < limits::MAX_PASSED_REQUESTS && self.routes.get(header.request).is_some() {
                self.ahead.push(ahead);
            }
        } else if header.flags.has(Flags::ROWS) {
            self.hand_over(header, Body::Bytes(payload.to_vec()), payload.len(), out);
        } else {
            match copies.take(self.shard, header, payload) {
                Ok(()) => {}
                Err(Unfit::Shape) => {
                    out.log(format!("{} sent parameters that do not fit the plan", self.shard));
                    return Ok(());
                }
                Err(Unfit::Memory) => {
                    return Err(format!("the parameters of table {table} do not fit this host's memory"));
                }
            }
            if let Some((body, len, is_encoded)) = copies.body(table, header.chunk) {
                // What is handed on is what the copy has, which may be newer than an answer that was late.
                let version = copies.version(table, header.chunk);
                let flags = header.flags.without(Flags::ENCODED);
                let flags = if is_encoded { flags.with(Flags::ENCODED) } else { flags };
                self.hand_over(&Header { version, flags, ..*header }, body, len, out);
            }
        }
        self.hand_out(copies, out);
        Ok(())
    }

    /// Passes one frame of an answer to the worker that it is for.
    fn hand_over(&mut self, header: &Header, body: Body, bytes: usize, out: &mut Out<'_>) {
        let Some(route) = self.routes.get(header.request).filter(|route| route.awaits_params) else { return };
        let is_rows = header.flags.has(Flags::ROWS);
        let landing = match body {
            Body::Stored { start, .. } => {
                let place = Place::from_bits(route.landing).and_then(|place| place.after(start as u64));
                place.map_or(0, Place::to_bits)
            }
            _ => 0,
        };
        let own = Header {
            request: route.request,
            landing,
            rows: if is_rows { header.rows } else { 0 },
            payload_bytes: bytes as u32,
            ..*header
        };
        out.report.bytes_to_workers += bytes as u64;
        out.send(self.through(route.worker), own, body);
        if header.flags.has(Flags::LAST) {
            self.routes.answered(header.request);
        }
    }

    /// Makes answers from the copy for those who were told that theirs is the same.
    fn hand_out(&mut self, copies: &Copies, out: &mut Out<'_>) {
        if self.ahead.is_empty() {
            return;
        }
        for ahead in std::mem::take(&mut self.ahead) {
            let chunks = self.tables[ahead.table].chunk_numbers();
            if !copies.has(ahead.table, chunks.iter().copied(), ahead.edition) {
                self.ahead.push(ahead);
                continue;
            }
            let mut header = Header::new(Kind::Params);
            header.table = TableId(ahead.table as u32);
            header.clock = ahead.clock;
            header.request = ahead.number;
            header.epoch = self.tables[ahead.table].valid_from;
            for (part, &chunk) in chunks.iter().enumerate() {
                let Some((body, len, is_encoded)) = copies.body(ahead.table, chunk) else { continue };
                header.chunk = chunk;
                header.part = part as u32;
                header.version = copies.version(ahead.table, chunk);
                let flags = if part + 1 == chunks.len() { Flags::LAST } else { Flags::default() };
                header.flags = if is_encoded { flags.with(Flags::ENCODED) } else { flags };
                self.hand_over(&header, body, len, out);
            }
        }
    }

    pub(super) fn through(&self, worker: WorkerId) -> NodeId {
        NodeId::Through(worker, self.shard)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.flights.memory_bytes() + self.tables.iter().map(Table::memory_bytes).sum::<usize>()
    }
}
