//! A reader of what a job broadcasts, and what it does: it comes, has versions, and goes.

use paramill_core::address::Addresses;
use paramill_core::landing::{Destination, Landing};
use paramill_core::role::{Body, Lost, Output, Role};
use paramill_core::types::{Clock, ConnectionId, NodeId, Time};
use paramill_core::wire::{Header, Hello, Refusal, Welcome};
use paramill_core::worker::{Ticket, Worker, WorkerError};

/// A reader that joins at once, and leaves when its time has come, or with the job.
#[derive(Debug)]
pub struct Spectator {
    worker: Worker,
    state: State,
    leaves_at: Option<Time>,
    stop: Option<Output>,
}

#[derive(Debug)]
enum State {
    Starting(Ticket),
    /// Until the job is over: the ticket is for a version that never comes.
    Reading(Ticket),
    Leaving(Ticket),
    Over,
    Failed(WorkerError),
}

impl Spectator {
    /// A reader's role, with the time at which it leaves; without one it stays.
    pub fn new(now: Time, mut worker: Worker, leaves_at: Option<Time>) -> Spectator {
        let state = worker.start(now).map_or_else(State::Failed, State::Starting);
        Spectator { worker, state, leaves_at, stop: None }
    }

    /// The role.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// Why it gave up, if it did.
    pub fn error(&self) -> Option<&WorkerError> {
        match &self.state {
            State::Failed(error) => Some(error),
            _ => None,
        }
    }

    /// Whether it has the job's tables, and follows them.
    pub fn is_reading(&self) -> bool {
        matches!(self.state, State::Reading(_))
    }

    /// Goes on as far as what has arrived allows.
    fn play(&mut self, now: Time) {
        let (State::Starting(ticket) | State::Reading(ticket) | State::Leaving(ticket)) = &self.state else {
            return;
        };
        let (ticket, is_due) = (*ticket, self.leaves_at.is_some_and(|at| at <= now));
        let next = match (&self.state, self.worker.outcome(ticket)) {
            (_, Some(Err(error))) => State::Failed(error),
            (State::Leaving(_), Some(Ok(()))) => State::Over,
            (State::Reading(_), _) if is_due => State::Leaving(self.worker.leave(now)),
            (State::Starting(_), Some(Ok(()))) => {
                self.worker.redeem(ticket);
                self.worker.await_version(now, Clock::MAX).map_or_else(State::Failed, State::Reading)
            }
            _ => return,
        };
        self.stop = match &next {
            State::Over => Some(Output::Stop { error: None }),
            State::Failed(error) => Some(Output::Stop { error: Some(error.to_string()) }),
            _ => None,
        };
        self.state = next;
    }
}

impl Role for Spectator {
    fn node(&self) -> Option<NodeId> {
        self.worker.node()
    }

    fn accept(&mut self, now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        self.worker.accept(now, hello)
    }

    fn handle_listening(&mut self, now: Time, addresses: Option<Addresses>) {
        self.worker.handle_listening(now, addresses);
    }

    fn hello(&self, connection: ConnectionId) -> Hello {
        self.worker.hello(connection)
    }

    fn handle_connected(&mut self, now: Time, connection: ConnectionId, welcome: &Welcome) {
        self.worker.handle_connected(now, connection, welcome);
        self.play(now);
    }

    fn handle_disconnected(&mut self, now: Time, connection: ConnectionId, why: &Lost) {
        self.worker.handle_disconnected(now, connection, why);
        self.play(now);
    }

    fn handle_frame(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        self.worker.handle_frame(now, connection, header, payload);
        self.play(now);
    }

    fn landing(
        &mut self,
        connection: ConnectionId,
        header: &Header,
        frames: usize,
        places: &mut Vec<Landing>,
    ) -> Option<Destination> {
        self.worker.landing(connection, header, frames, places)
    }

    fn handle_landed(&mut self, now: Time, connection: ConnectionId, header: &Header) {
        self.worker.handle_landed(now, connection, header);
        self.play(now);
    }

    fn handle_timeout(&mut self, now: Time) {
        self.worker.handle_timeout(now);
        self.play(now);
    }

    fn next_timeout(&self) -> Option<Time> {
        let leaves_at = self.leaves_at.filter(|_| self.is_reading());
        self.worker.next_timeout().into_iter().chain(leaves_at).min()
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.worker.poll_output().or_else(|| self.stop.take())
    }

    fn backlog_bytes(&self) -> usize {
        self.worker.backlog_bytes()
    }

    fn refresh(&self, header: &mut Header) {
        self.worker.refresh(header);
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        self.worker.payload(body)
    }

    fn check(&self) -> Result<(), String> {
        self.worker.check()
    }
}
