//! Somebody who gives commands while a job runs, as `paramill set`, `drain` and `status` do.

use paramill_core::link::Link;
use paramill_core::role::{Lost, Output, Role};
use paramill_core::types::{ConnectionId, NodeId, Time};
use paramill_core::wire::control::frame;
use paramill_core::wire::{Control, Header, Hello, Kind, Party, Refusal, Welcome};
use std::collections::VecDeque;

/// A command that stays connected and gives every order at its time.
#[derive(Debug)]
pub struct Operator {
    job: String,
    link: Link,
    orders: VecDeque<(Time, Control)>,
    /// An order was sent and not yet answered; it is sent again on a new connection.
    asked: bool,
    outputs: VecDeque<Output>,
}

impl Operator {
    /// An operator of the job whose coordinator is at `coordinator`, with orders by time.
    pub fn new(job: &str, coordinator: &str, orders: Vec<(Time, Control)>) -> Operator {
        Operator {
            job: job.to_owned(),
            link: Link::new(Time::ZERO, NodeId::Coordinator, coordinator),
            orders: orders.into(),
            asked: false,
            outputs: VecDeque::new(),
        }
    }

    fn ask(&mut self, now: Time) {
        let Some((at, order)) = self.orders.front() else { return };
        if self.asked || !self.link.is_up() || *at > now {
            return;
        }
        self.asked = true;
        self.outputs.push_back(Output::send(NodeId::Coordinator, frame(Kind::Control, order)));
    }
}

impl Role for Operator {
    fn node(&self) -> Option<NodeId> {
        None
    }

    fn accept(&mut self, _now: Time, _hello: &Hello) -> Result<Welcome, Refusal> {
        Err(Refusal { reason: "a command takes no connections".into(), retry: false })
    }

    fn hello(&self, _connection: ConnectionId) -> Hello {
        Hello { job: self.job.clone(), from: Party::Command, incarnation: 0, to: None }
    }

    fn handle_connected(&mut self, now: Time, _connection: ConnectionId, _welcome: &Welcome) {
        self.link.connected();
        self.ask(now);
    }

    fn handle_disconnected(&mut self, now: Time, _connection: ConnectionId, why: &Lost) {
        self.link.disconnected(now, why);
        self.asked = false;
    }

    fn handle_frame(&mut self, now: Time, _connection: ConnectionId, header: &Header, _payload: &[u8]) {
        if matches!(header.kind, Kind::Control | Kind::Error) && std::mem::take(&mut self.asked) {
            self.orders.pop_front();
            self.ask(now);
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        if let Some(sentence) = self.link.overdue(now) {
            self.orders.clear();
            self.outputs.push_back(Output::Stop { error: Some(sentence) });
        }
        self.outputs.extend(self.link.poll(now));
        self.ask(now);
    }

    fn next_timeout(&self) -> Option<Time> {
        if self.orders.is_empty() {
            return None;
        }
        let order = self.orders.front().filter(|_| self.link.is_up() && !self.asked);
        [self.link.next_timeout(), order.map(|(at, _)| *at)].into_iter().flatten().min()
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }
}
