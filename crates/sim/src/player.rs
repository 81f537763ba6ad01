//! A worker and the application that drives it: the same role as in a real process, trained in virtual time.
//!
//! An iteration pulls the rows it needs of sparse tables, computes, pushes every table, and waits for the parameters
//! that follow.

use crate::compute::ComputeClock;
use crate::gradient::{Gradients, PushId, touched_rows};
use paramill_core::role::{Body, Landing, Lost, Output, Role};
use paramill_core::table::TableSpec;
use paramill_core::types::{Clock, NodeId, TableId, Time, WorkerId};
use paramill_core::wire::{Header, Hello, Refusal, Welcome};
use paramill_core::worker::{Gradient, PullOptions, Ticket, Worker, WorkerError};
use std::time::Duration;

/// What the application does.
#[derive(Debug)]
pub struct Program {
    /// Who plays.
    pub worker: WorkerId,
    /// What is trained.
    pub tables: Vec<TableSpec>,
    /// What is pushed.
    pub gradients: Gradients,
    /// Iterations to do.
    pub iterations: Clock,
    /// Seed of the gradients.
    pub seed: u64,
    /// Computation times.
    pub compute: ComputeClock,
}

/// A worker with its application.
#[derive(Debug)]
pub struct Player {
    worker: Worker,
    program: Program,
    state: State,
    /// The rows that this iteration works on, for each sparse table, and their values.
    rows: Vec<(Vec<u32>, Vec<f32>)>,
    gradient: Vec<f32>,
    times: Times,
    stop: Option<Output>,
}

/// How a worker spent its time.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Times {
    /// When the job started for it.
    pub started: Option<Time>,
    /// When its last iteration was over.
    pub finished: Option<Time>,
    /// Computing.
    pub computed: Duration,
    /// Waiting for parameters.
    pub waited: Duration,
}

/// How far a worker is. What it does over and over, as connecting, changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    clock: Clock,
    state: std::mem::Discriminant<State>,
    /// Tables that it waits for.
    open: usize,
}

#[derive(Debug)]
enum State {
    Starting(Ticket),
    /// Waits for the rows of this iteration.
    Pulling {
        since: Time,
        tickets: Vec<(usize, Ticket)>,
    },
    Computing {
        until: Time,
    },
    /// Waits for what follows this iteration's pushes.
    Waiting {
        since: Time,
        tickets: Vec<Ticket>,
    },
    Leaving(Ticket),
    Over,
    Failed(WorkerError),
}

impl Player {
    /// A worker that declares its tables and joins at once.
    pub fn new(mut worker: Worker, program: Program) -> Player {
        let state = declare_and_start(&mut worker, &program).map_or_else(State::Failed, State::Starting);
        let rows = vec![Default::default(); program.tables.len()];
        let (times, gradient) = (Times::default(), Vec::new());
        Player { worker, program, state, rows, gradient, times, stop: None }
    }

    /// The role.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// Iterations completed.
    pub fn clock(&self) -> Clock {
        self.worker.current_clock()
    }

    /// Why the application gave up, if it did.
    pub fn error(&self) -> Option<&WorkerError> {
        match &self.state {
            State::Failed(error) => Some(error),
            _ => None,
        }
    }

    /// Whether all iterations are done.
    pub fn is_finished(&self) -> bool {
        self.times.finished.is_some()
    }

    pub(crate) fn progress(&self) -> Progress {
        let open = match &self.state {
            State::Pulling { tickets, .. } => tickets.len(),
            State::Waiting { tickets, .. } => tickets.len(),
            _ => 0,
        };
        Progress { clock: self.clock(), state: std::mem::discriminant(&self.state), open }
    }

    /// When the computation at hand is over.
    pub(crate) fn computes_until(&self) -> Option<Time> {
        match self.state {
            State::Computing { until } => Some(until),
            _ => None,
        }
    }

    /// Whether [`Player::doing`] is what it waits for.
    pub(crate) fn is_waiting(&self) -> bool {
        match &self.state {
            State::Starting(_) | State::Leaving(_) => true,
            State::Pulling { .. } | State::Waiting { .. } => self.progress().open > 0,
            State::Computing { .. } | State::Over | State::Failed(_) => false,
        }
    }

    /// How the time was spent.
    pub fn times(&self) -> Times {
        self.times
    }

    /// What the application is doing, as a sentence.
    pub fn doing(&self, now: Time) -> String {
        let clock = self.clock();
        match &self.state {
            State::Starting(ticket) | State::Leaving(ticket) => self.worker.explain(now, *ticket),
            State::Pulling { tickets, .. } => match tickets.first() {
                Some((_, ticket)) => self.worker.explain(now, *ticket),
                None => format!("is about to compute iteration {clock}"),
            },
            State::Waiting { tickets, .. } => match tickets.first() {
                Some(ticket) => self.worker.explain(now, *ticket),
                None => format!("is about to begin iteration {clock}"),
            },
            State::Computing { .. } => format!("computes iteration {clock}"),
            State::Over => "is done".into(),
            State::Failed(error) => format!("failed at clock {clock}: {error}"),
        }
    }

    /// Goes on as far as what has arrived allows.
    fn play(&mut self, now: Time) {
        while let Some(next) = self.next_state(now) {
            self.state = next.unwrap_or_else(|error| {
                self.stop = Some(Output::Stop { error: Some(error.to_string()) });
                State::Failed(error)
            });
        }
    }

    /// The state after this one, once it is over.
    fn next_state(&mut self, now: Time) -> Option<Result<State, WorkerError>> {
        match &mut self.state {
            State::Starting(ticket) => {
                let outcome = self.worker.outcome(*ticket)?;
                self.worker.redeem(*ticket);
                self.times.started = Some(now);
                Some(outcome.and_then(|()| self.begin(now)))
            }
            State::Pulling { since, tickets } => {
                while let Some(&(table, ticket)) = tickets.last() {
                    if let Err(error) = self.worker.outcome(ticket)? {
                        return Some(Err(error));
                    }
                    self.rows[table].1 = self.worker.redeem(ticket);
                    tickets.pop();
                }
                self.times.waited += now.since(*since);
                let time = self.program.compute.step(self.worker.current_clock());
                self.times.computed += time;
                Some(Ok(State::Computing { until: now + time }))
            }
            State::Computing { until } if *until <= now => Some(self.push(now)),
            State::Computing { .. } => None,
            State::Waiting { since, tickets } => {
                while let Some(&ticket) = tickets.last() {
                    if let Err(error) = self.worker.outcome(ticket)? {
                        return Some(Err(error));
                    }
                    self.worker.redeem(ticket);
                    tickets.pop();
                }
                self.times.waited += now.since(*since);
                Some(self.begin(now))
            }
            State::Leaving(ticket) => {
                let outcome = self.worker.outcome(*ticket)?;
                self.stop = outcome.is_ok().then_some(Output::Stop { error: None });
                Some(outcome.map(|()| State::Over))
            }
            State::Over | State::Failed(_) => None,
        }
    }

    /// Begins an iteration, or leaves after the last one.
    fn begin(&mut self, now: Time) -> Result<State, WorkerError> {
        let clock = self.worker.current_clock();
        let Program { worker, tables, iterations, seed, .. } = &self.program;
        if clock == *iterations {
            self.times.finished = Some(now);
            return Ok(State::Leaving(self.worker.leave(now)));
        }
        let mut tickets = Vec::new();
        for (index, spec) in tables.iter().enumerate().filter(|(_, spec)| spec.rows) {
            let table = TableId(index as u32);
            let rows = touched_rows(*seed, *worker, clock, table, spec);
            tickets
                .push((index, self.worker.pull(now, table, PullOptions { rows: Some(&rows), now: false })?));
            self.rows[index].0 = rows;
        }
        Ok(State::Pulling { since: now, tickets })
    }

    fn push(&mut self, now: Time) -> Result<State, WorkerError> {
        let clock = self.worker.current_clock();
        let Program { worker, tables, gradients, seed, .. } = &self.program;
        let mut tickets = Vec::with_capacity(tables.len());
        for (index, spec) in tables.iter().enumerate() {
            let table = TableId(index as u32);
            let push = PushId { seed: *seed, worker: *worker, clock, table };
            self.gradient.clear();
            let gradient = if spec.rows {
                let (rows, values) = &self.rows[index];
                gradients.extend_rows(&push, rows, spec.row_elements(), values, &mut self.gradient);
                Gradient::Rows { rows, values: &self.gradient }
            } else {
                gradients.extend(&push, 0, self.worker.values(table), &mut self.gradient);
                Gradient::Dense(&self.gradient)
            };
            tickets.push(self.worker.push(now, table, gradient, !spec.rows)?);
        }
        self.worker.clock();
        Ok(State::Waiting { since: now, tickets })
    }
}

fn declare_and_start(worker: &mut Worker, program: &Program) -> Result<Ticket, WorkerError> {
    for (index, spec) in program.tables.iter().enumerate() {
        let at = |element| program.gradients.initial(program.seed, TableId(index as u32), element);
        worker.declare(spec.clone(), (0..spec.elements()).map(at).collect())?;
    }
    worker.start(Time::ZERO)
}

impl Role for Player {
    fn node(&self) -> Option<NodeId> {
        self.worker.node()
    }

    fn accept(&mut self, now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        self.worker.accept(now, hello)
    }

    fn hello(&self, peer: NodeId) -> Hello {
        self.worker.hello(peer)
    }

    fn handle_connected(&mut self, now: Time, peer: NodeId, welcome: &Welcome) {
        self.worker.handle_connected(now, peer, welcome);
        self.play(now);
    }

    fn handle_disconnected(&mut self, now: Time, peer: NodeId, why: &Lost) {
        self.worker.handle_disconnected(now, peer, why);
        self.play(now);
    }

    fn handle_frame(&mut self, now: Time, from: NodeId, header: &Header, payload: &[u8]) {
        self.worker.handle_frame(now, from, header, payload);
        self.play(now);
    }

    fn landing(
        &mut self,
        from: NodeId,
        header: &Header,
        frames: usize,
        places: &mut Vec<Landing>,
    ) -> Option<&mut [u8]> {
        self.worker.landing(from, header, frames, places)
    }

    fn handle_landed(&mut self, now: Time, from: NodeId, header: &Header) {
        self.worker.handle_landed(now, from, header);
        self.play(now);
    }

    fn progress(&self, peer: NodeId) -> Option<u64> {
        self.worker.progress(peer)
    }

    fn handle_timeout(&mut self, now: Time) {
        self.worker.handle_timeout(now);
        self.play(now);
    }

    fn next_timeout(&self) -> Option<Time> {
        [self.worker.next_timeout(), self.computes_until()].into_iter().flatten().min()
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.worker.poll_output().or_else(|| self.stop.take())
    }

    fn refresh(&self, header: &mut Header) {
        self.worker.refresh(header);
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        self.worker.payload(body)
    }

    fn backlog_bytes(&self) -> usize {
        self.worker.backlog_bytes()
    }

    fn check(&self) -> Result<(), String> {
        self.worker.check()
    }
}
