//! A role with a bug in it: what the bug does not change is the role's own.

use paramill_core::address::Addresses;
use paramill_core::checkpoint::Response;
use paramill_core::landing::{Destination, Landing};
use paramill_core::role::{Body, Lost, Output, Role};
use paramill_core::types::{ConnectionId, NodeId, Time};
use paramill_core::wire::{Header, Hello, Refusal, Welcome};

/// What a bug changes of the role that has it. No method is required: each passes on to the role what it is given.
pub trait Bug<R: Role> {
    /// A connection is lost.
    fn handle_disconnected(&mut self, role: &mut R, now: Time, connection: ConnectionId, why: &Lost) {
        role.handle_disconnected(now, connection, why);
    }

    /// A frame is here.
    fn handle_frame(
        &mut self,
        role: &mut R,
        now: Time,
        connection: ConnectionId,
        header: &Header,
        payload: &[u8],
    ) {
        role.handle_frame(now, connection, header, payload);
    }

    /// The next output, at the time of the last event.
    fn poll_output(&mut self, role: &mut R, _now: Time) -> Option<Output> {
        role.poll_output()
    }

    /// A header that waited is brought up to date.
    fn refresh(&self, role: &R, header: &mut Header) {
        role.refresh(header);
    }
}

/// A role with a bug.
#[derive(Debug)]
pub struct Broken<R, B> {
    role: R,
    bug: B,
    /// When something happened last.
    now: Time,
}

impl<R: Role, B: Bug<R>> Broken<R, B> {
    /// Plants a bug in a role.
    pub fn new(role: R, bug: B) -> Broken<R, B> {
        Broken { role, bug, now: Time::ZERO }
    }

    /// The role inside.
    pub fn role(&self) -> &R {
        &self.role
    }

    /// The bug.
    pub fn bug(&self) -> &B {
        &self.bug
    }
}

impl<R: Role, B: Bug<R>> Role for Broken<R, B> {
    fn node(&self) -> Option<NodeId> {
        self.role.node()
    }

    fn accept(&mut self, now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        self.now = now;
        self.role.accept(now, hello)
    }

    fn hello(&self, connection: ConnectionId) -> Hello {
        self.role.hello(connection)
    }

    fn handle_listening(&mut self, now: Time, addresses: Option<Addresses>) {
        self.now = now;
        self.role.handle_listening(now, addresses);
    }

    fn handle_remembered(&mut self, now: Time) {
        self.now = now;
        self.role.handle_remembered(now);
    }

    fn handle_archived(&mut self, now: Time, response: Response) {
        self.now = now;
        self.role.handle_archived(now, response);
    }

    fn handle_connected(&mut self, now: Time, connection: ConnectionId, welcome: &Welcome) {
        self.now = now;
        self.role.handle_connected(now, connection, welcome);
    }

    fn handle_disconnected(&mut self, now: Time, connection: ConnectionId, why: &Lost) {
        self.now = now;
        self.bug.handle_disconnected(&mut self.role, now, connection, why);
    }

    fn handle_frame(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        self.now = now;
        self.bug.handle_frame(&mut self.role, now, connection, header, payload);
    }

    fn landing(
        &mut self,
        connection: ConnectionId,
        header: &Header,
        frames: usize,
        places: &mut Vec<Landing>,
    ) -> Option<Destination> {
        self.role.landing(connection, header, frames, places)
    }

    fn handle_landed(&mut self, now: Time, connection: ConnectionId, header: &Header) {
        self.now = now;
        self.role.handle_landed(now, connection, header);
    }

    fn progress(&self, connection: ConnectionId) -> Option<u64> {
        self.role.progress(connection)
    }

    fn handle_timeout(&mut self, now: Time) {
        self.now = now;
        self.role.handle_timeout(now);
    }

    fn next_timeout(&self) -> Option<Time> {
        self.role.next_timeout()
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.bug.poll_output(&mut self.role, self.now)
    }

    fn backlog_bytes(&self) -> usize {
        self.role.backlog_bytes()
    }

    fn awaits_silence(&self) -> bool {
        self.role.awaits_silence()
    }

    fn handle_silence(&mut self, now: Time) {
        self.now = now;
        self.role.handle_silence(now);
    }

    fn refresh(&self, header: &mut Header) {
        self.bug.refresh(&self.role, header);
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        self.role.payload(body)
    }

    fn check(&self) -> Result<(), String> {
        self.role.check()
    }
}
