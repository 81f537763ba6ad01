//! A worker and the application that drives it: the same role as in a real process, trained in virtual time.
//!
//! An iteration pulls the rows it needs of sparse tables, computes, pushes every table, and waits for the parameters
//! that follow. One that is computed layer by layer pushes a table when its layer's backward is done, and waits for a
//! table's parameters when its layer's forward needs them. Nothing changes what it reads while it computes: a player remembers a digest, and its check fails when
//! memory is not what it was.
//!
//! Under the policy `local` an iteration is `h` steps of computation, and each fragment of the tables is pushed when it is due. What is
//! pushed has the size of a pseudo-gradient, and the contents of a gradient.

use crate::canary::Canary;
use crate::compute::{ComputeClock, LayerTimes, Stage};
use crate::gradient::{Gradients, PushId, touched_rows};
use crate::judge::{CONDITION, JudgeModel};
use crate::training::{Loss, Studies};
use paramill_core::address::Addresses;
use paramill_core::landing::{Destination, Landing};
use paramill_core::local::LocalSteps;
use paramill_core::prng::Prng;
use paramill_core::role::{Body, Lost, Output, Role};
use paramill_core::table::TableSpec;
use paramill_core::types::{Clock, ConnectionId, NodeId, TableId, Time, WorkerId};
use paramill_core::wire::{Cause, Header, Hello, Refusal, Welcome};
use paramill_core::worker::{Asked, Gradient, PullOptions, Slab, Ticket, Worker, WorkerError};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::time::Duration;

thread_local! {
    /// Where a gradient is computed. Players of a world play one after another: thousands of them need one array, not one each.
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// What the application does.
#[derive(Debug)]
pub struct Program {
    /// Who plays.
    pub worker: WorkerId,
    /// Tells this process from others with its rank: later ones have larger numbers.
    pub life: u64,
    /// What is trained.
    pub tables: Vec<TableSpec>,
    /// What is pushed, unless it is computed.
    pub gradients: Gradients,
    /// What computes it.
    pub(crate) studies: Option<Studies>,
    /// Iterations to do.
    pub iterations: Clock,
    /// How long it stays when it has done them.
    pub lingers: Duration,
    /// Seed of the gradients.
    pub seed: u64,
    /// Computation times.
    pub compute: ComputeClock,
    /// Steps that it makes by itself between synchronisations.
    pub local: Option<LocalSteps>,
    /// How they are divided, where an application computes and sends layer by layer.
    pub layers: Option<LayerTimes>,
    /// What worker 0 says of pulls that servers ask about.
    pub judge: JudgeModel,
    /// Whether dense tables are exchanged as slabs.
    pub slabs: bool,
    /// The probability that a gradient has a NaN in it. The application tries again without it where it is told, and goes
    /// on where a server refuses it.
    pub nan_p: f64,
    /// Whether memory is watched while it is read.
    pub watches_memory: bool,
    /// A bug to plant in the application.
    pub canary: Option<Canary>,
}

/// A worker with its application.
#[derive(Debug)]
pub struct Player {
    worker: Worker,
    program: Program,
    state: State,
    local: Option<Local>,
    /// The rows that this iteration works on, for each sparse table, and their values.
    rows: Vec<(Vec<u32>, Vec<f32>)>,
    /// The slabs of dense tables, while the application has them.
    slabs: Vec<Slab>,
    /// Tables whose last exchange failed: the application goes on with what it had.
    stuck: BTreeSet<TableId>,
    /// Tickets of what is to come, with the table of each.
    owed: Vec<(usize, Owed)>,
    /// Digests of the dense tables that the computation at hand reads.
    read: Vec<(TableId, u64)>,
    /// What changed while it was read.
    torn: Option<String>,
    /// The ticket that the application waits for.
    waits_for: Option<Ticket>,
    /// The pull that is being judged, and until when.
    judged: Option<(Time, Asked)>,
    /// NaNs that were put into gradients.
    nans: u64,
    times: Times,
    first_clock: Clock,
    stop: Option<Output>,
}

/// Where a worker is with its own steps.
#[derive(Debug)]
struct Local {
    steps: LocalSteps,
    /// Of each table.
    fragments: Vec<usize>,
    /// Steps of the job that are behind it.
    made: u64,
    /// What was pushed and is merged later, by fragment.
    in_flight: Vec<Vec<(usize, Owed)>>,
}

impl Local {
    fn new(steps: LocalSteps, tables: &[TableSpec]) -> Result<Local, WorkerError> {
        let sizes: Vec<u64> = tables.iter().map(TableSpec::elements).collect();
        let fragments = steps.deal(&sizes).map_err(|error| WorkerError::Table(error.to_string()))?;
        let in_flight = (0..steps.fragments()).map(|_| Vec::new()).collect();
        Ok(Local { steps, fragments, made: 0, in_flight })
    }

    /// The answers that are merged now, if there are some.
    fn take_merged(&mut self) -> Option<Vec<(usize, Owed)>> {
        let fragment = self.steps.merged_after(self.made).filter(|_| self.steps.late() > 0)?;
        Some(std::mem::take(&mut self.in_flight[fragment])).filter(|owed| !owed.is_empty())
    }

    /// The number of steps after which something is pushed or merged next.
    fn next_due(&self) -> u64 {
        let is_due =
            |made: &u64| self.steps.pushed_after(*made).is_some() || self.steps.merged_after(*made).is_some();
        (self.made + 1..).find(is_due).expect("every fragment has its turn")
    }

    fn is_in_flight(&self, table: TableId) -> bool {
        !self.in_flight[self.fragments[table.0 as usize]].is_empty()
    }
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
    /// Tables that it waits for, or layers that are left to compute.
    open: usize,
}

/// What an application waits for.
#[derive(Debug, Clone, Copy)]
enum Owed {
    /// The rows of this iteration.
    Rows(Ticket),
    /// What follows a push.
    Pushed(Ticket),
    /// Slabs that are exchanged.
    Slabs(Ticket),
}

impl Owed {
    fn ticket(self) -> Ticket {
        match self {
            Owed::Rows(ticket) | Owed::Pushed(ticket) | Owed::Slabs(ticket) => ticket,
        }
    }
}

#[derive(Debug)]
enum State {
    Starting(Ticket),
    /// Waits for the rows of this iteration.
    Pulling {
        since: Time,
        clock: Clock,
    },
    Computing {
        until: Time,
    },
    /// Computes a step layer by layer, which takes `step` in all.
    Layers {
        step: Duration,
        /// Stages that are done.
        done: usize,
        at: Layer,
    },
    /// Waits for what follows its pushes.
    Waiting {
        since: Time,
        /// Whether a fragment is to be pushed after that.
        pushes: bool,
    },
    /// Has done all iterations.
    Lingering {
        until: Time,
    },
    Leaving(Ticket),
    Over,
    Failed(WorkerError),
}

/// What a layer is at.
#[derive(Debug, Clone, Copy)]
enum Layer {
    /// Its forward waits for its parameters.
    Waiting { since: Time },
    /// It is computed.
    Computing { until: Time },
}

impl Player {
    /// A worker that declares its tables and joins at once.
    pub fn new(now: Time, mut worker: Worker, program: Program) -> Player {
        worker.judge(CONDITION);
        let local = program.local.clone().map(|steps| Local::new(steps, &program.tables)).transpose();
        if program.local.is_some() {
            worker.step_locally();
        }
        let (local, state) = match local {
            Ok(local) => {
                let started = declare_and_start(now, &mut worker, &program);
                (local, started.map_or_else(State::Failed, State::Starting))
            }
            Err(error) => (None, State::Failed(error)),
        };
        let rows = vec![Default::default(); program.tables.len()];
        Player {
            worker,
            program,
            state,
            local,
            rows,
            slabs: Vec::new(),
            stuck: BTreeSet::new(),
            owed: Vec::new(),
            read: Vec::new(),
            torn: None,
            judged: None,
            waits_for: None,
            nans: 0,
            times: Times::default(),
            first_clock: 0,
            stop: None,
        }
    }

    /// The role.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// NaNs that were put into gradients so far.
    pub fn nans(&self) -> u64 {
        self.nans
    }

    /// Tells this process from others with its rank.
    pub fn life(&self) -> u64 {
        self.program.life
    }

    /// The first iteration that it takes part in, once it is known.
    pub fn first_clock(&self) -> Option<Clock> {
        self.times.started.map(|_| self.first_clock)
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
            State::Pulling { .. } | State::Waiting { .. } => self.owed.len(),
            State::Layers { done, .. } => usize::MAX - done,
            _ => 0,
        };
        Progress { clock: self.clock(), state: std::mem::discriminant(&self.state), open }
    }

    /// The iteration that it computes, and the table whose layer it is at, where it computes layer by layer.
    pub(crate) fn computing(&self) -> Option<(Clock, Option<TableId>)> {
        match self.state {
            State::Computing { .. } => Some((self.clock(), None)),
            State::Layers { done, at: Layer::Computing { .. }, .. } => match self.stage(done)? {
                Stage::Forward(table) => Some((self.clock(), Some(TableId(table as u32)))),
                Stage::Backward(_) => None,
            },
            _ => None,
        }
    }

    /// Whether the last exchange of a table succeeded, if it is exchanged.
    pub(crate) fn has_renewed(&self, table: TableId) -> bool {
        !self.stuck.contains(&table)
    }

    /// Whether it computes on what the worker has of a table: one that goes on while parameters are on their way reads its own copy.
    fn reads(&self, table: TableId) -> bool {
        !self.local.as_ref().is_some_and(|local| local.is_in_flight(table))
    }

    /// A dense table as the application reads it: in its slab, or in the worker's memory.
    pub(crate) fn values(&self, table: TableId) -> Option<&[f32]> {
        if self.program.tables[table.0 as usize].rows || !self.reads(table) {
            return None;
        }
        match self.program.slabs {
            true => self.slabs.iter().find(|slab| slab.table() == table).map(Slab::values),
            false => Some(self.worker.values(table)),
        }
    }

    /// When the computation at hand is over.
    pub(crate) fn computes_until(&self) -> Option<Time> {
        match self.state {
            State::Computing { until }
            | State::Lingering { until }
            | State::Layers { at: Layer::Computing { until }, .. } => Some(until),
            _ => None,
        }
    }

    /// Whether [`Player::doing`] is what it waits for.
    pub(crate) fn is_waiting(&self) -> bool {
        match &self.state {
            State::Starting(_) | State::Leaving(_) => true,
            State::Layers { at, .. } => matches!(at, Layer::Waiting { .. }),
            State::Pulling { .. } | State::Waiting { .. } => self.progress().open > 0,
            State::Computing { .. } | State::Lingering { .. } | State::Over | State::Failed(_) => false,
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
            State::Pulling { .. } | State::Waiting { .. } => match self.owed.first() {
                Some((_, owed)) => self.worker.explain(now, owed.ticket()),
                None => format!("is about to begin iteration {clock}"),
            },
            State::Layers { done, at: Layer::Waiting { .. }, .. } => {
                match self.owed.iter().find(|(table, _)| self.stage(*done) == Some(Stage::Forward(*table))) {
                    Some((_, owed)) => self.worker.explain(now, owed.ticket()),
                    None => format!("is about to compute a layer of iteration {clock}"),
                }
            }
            State::Computing { .. } | State::Layers { .. } => format!("computes iteration {clock}"),
            State::Lingering { .. } | State::Over => "is done".into(),
            State::Failed(error) => format!("failed at clock {clock}: {error}"),
        }
    }

    /// The losses of the steps that this process made, where gradients are computed.
    pub fn losses(&self) -> &[Loss] {
        self.program.studies.as_ref().map_or(&[], Studies::losses)
    }

    /// Goes on as far as what has arrived allows.
    fn play(&mut self, now: Time) {
        self.judge(now);
        while let Some(next) = self.next_state(now) {
            self.state = next.unwrap_or_else(|error| {
                self.stop = Some(Output::Stop { error: Some(error.to_string()) });
                State::Failed(error)
            });
        }
    }

    /// Evaluates the condition for the servers that ask, one pull after another.
    fn judge(&mut self, now: Time) {
        loop {
            match self.judged.take() {
                Some((until, asked)) if until > now => {
                    self.judged = Some((until, asked));
                    return;
                }
                Some((_, asked)) => {
                    let verdict = self.program.judge.verdict(self.program.seed, &asked.question);
                    self.worker.answer(&asked, verdict);
                }
                None => match self.worker.poll_question(now) {
                    Some(asked) => self.judged = Some((now + self.program.judge.takes(), asked)),
                    None => return,
                },
            }
        }
    }

    /// The state after this one, once it is over.
    fn next_state(&mut self, now: Time) -> Option<Result<State, WorkerError>> {
        match &mut self.state {
            State::Starting(ticket) => {
                let outcome = outcome(&mut self.worker, &mut self.waits_for, now, *ticket)?;
                self.worker.redeem(*ticket);
                self.times.started = outcome.is_ok().then_some(now);
                self.first_clock = self.worker.current_clock();
                if let Some(local) = &mut self.local {
                    local.made = local.steps.first_step(self.first_clock);
                }
                Some(outcome.and_then(|()| self.take_slabs()).and_then(|()| self.begin(now)))
            }
            &mut State::Pulling { since, clock } => {
                if let Err(error) = self.collect(now, None)? {
                    return Some(Err(error));
                }
                self.times.waited += now.since(since);
                // The rows were of a round that has closed: it goes on with the one that is open.
                if clock != self.worker.current_clock() {
                    return Some(self.begin(now));
                }
                let time = match &mut self.local {
                    None => self.program.compute.step(self.worker.current_clock()),
                    Some(local) => {
                        let next = local.next_due();
                        let first = std::mem::replace(&mut local.made, next);
                        (first..local.made).map(|step| self.program.compute.step(step)).sum()
                    }
                };
                let time = time + self.program.compute.stall(now + time);
                self.times.computed += time;
                (0..self.program.tables.len()).for_each(|table| self.remember_read(table));
                self.compute();
                Some(Ok(State::Computing { until: now + time }))
            }
            State::Computing { until } if *until <= now => {
                (0..self.program.tables.len()).for_each(|table| self.compare_read(table));
                match self.local.as_mut().and_then(Local::take_merged) {
                    Some(owed) => {
                        self.owed.extend(owed);
                        Some(Ok(State::Waiting { since: now, pushes: true }))
                    }
                    None => Some(self.push(now)),
                }
            }
            &mut State::Layers { step, done, at } => self.next_layer(now, step, done, at),
            State::Lingering { until } if *until <= now => Some(Ok(State::Leaving(self.worker.leave(now)))),
            State::Computing { .. } | State::Lingering { .. } => None,
            &mut State::Waiting { since, pushes } => {
                if let Err(error) = self.collect(now, None)? {
                    return Some(Err(error));
                }
                self.times.waited += now.since(since);
                Some(if pushes { self.push(now) } else { self.begin(now) })
            }
            State::Leaving(ticket) => {
                let outcome = outcome(&mut self.worker, &mut self.waits_for, now, *ticket)?;
                // A gradient that a server refused after the application had gone on is told at last.
                let outcome = match outcome {
                    Err(error) if is_nan(&error) && self.program.nan_p > 0.0 => Ok(()),
                    other => other,
                };
                self.stop = outcome.is_ok().then_some(Output::Stop { error: None });
                Some(outcome.map(|()| State::Over))
            }
            State::Over | State::Failed(_) => None,
        }
    }

    /// Begins an iteration, goes on with its own steps, or leaves after the last one.
    fn begin(&mut self, now: Time) -> Result<State, WorkerError> {
        let clock = self.worker.current_clock();
        let mut in_flight = self.local.iter_mut().flat_map(|local| &mut local.in_flight);
        if clock >= self.program.iterations
            && let Some(owed) = in_flight.find(|owed| !owed.is_empty())
        {
            self.owed.append(owed);
            return Ok(State::Waiting { since: now, pushes: false });
        }
        let Program { worker, tables, iterations, seed, studies, .. } = &mut self.program;
        // One that joins when the others are done has nothing left to do.
        if clock >= *iterations {
            self.times.finished = Some(now);
            return Ok(match self.program.lingers {
                Duration::ZERO => State::Leaving(self.worker.leave(now)),
                lingers => State::Lingering { until: now + lingers },
            });
        }
        let mut read = studies.as_mut().map(|studies| studies.prepare(clock));
        for (index, spec) in tables.iter().enumerate().filter(|(_, spec)| spec.rows) {
            let table = TableId(index as u32);
            let rows = match &mut read {
                Some(read) => read[index].take().unwrap_or_else(|| (0..spec.shape[0] as u32).collect()),
                None => touched_rows(*seed, *worker, clock, table, spec),
            };
            let ticket = self.worker.pull(now, table, PullOptions { rows: Some(&rows), now: false })?;
            self.owed.push((index, Owed::Rows(ticket)));
            self.rows[index].0 = rows;
        }
        if self.program.layers.is_none() {
            return Ok(State::Pulling { since: now, clock });
        }
        let step = self.program.compute.step(clock);
        let step = step + self.program.compute.stall(now + step);
        self.times.computed += step;
        Ok(State::Layers { step, done: 0, at: Layer::Waiting { since: now } })
    }

    /// The part of a step that follows those that are done; none after the last one.
    fn stage(&self, done: usize) -> Option<Stage> {
        let layers = self.program.layers.as_ref()?;
        (done < layers.stages()).then(|| layers.stage(done))
    }

    /// Goes on with a step that is computed layer by layer.
    fn next_layer(
        &mut self,
        now: Time,
        step: Duration,
        done: usize,
        at: Layer,
    ) -> Option<Result<State, WorkerError>> {
        let Some(stage) = self.stage(done) else { return Some(self.end_layers(now)) };
        match at {
            Layer::Waiting { since } => {
                if let Stage::Forward(table) = stage {
                    if let Err(error) = self.collect(now, Some(table))? {
                        return Some(Err(error));
                    }
                    self.remember_read(table);
                }
                self.times.waited += now.since(since);
                let time = self.program.layers.as_ref()?.time(stage, step);
                Some(Ok(State::Layers { step, done, at: Layer::Computing { until: now + time } }))
            }
            Layer::Computing { until } if until > now => None,
            Layer::Computing { .. } => {
                if let (Stage::Forward(_), Some(Stage::Backward(_))) = (stage, self.stage(done + 1)) {
                    self.compute();
                }
                if let Stage::Backward(table) = stage {
                    self.compare_read(table);
                    if let Err(error) = self.push_layer(now, table) {
                        return Some(Err(error));
                    }
                }
                Some(Ok(State::Layers { step, done: done + 1, at: Layer::Waiting { since: now } }))
            }
        }
    }

    /// All layers are computed, and all gradients are on their way.
    fn end_layers(&mut self, now: Time) -> Result<State, WorkerError> {
        self.worker.clock();
        match self.worker.current_clock() >= self.program.iterations {
            true => Ok(State::Waiting { since: now, pushes: false }),
            false => self.begin(now),
        }
    }

    /// Takes what has come for a table, or for all of them. `None` while something of it is under way.
    fn collect(&mut self, now: Time, table: Option<usize>) -> Option<Result<(), WorkerError>> {
        let mut next = 0;
        while let Some(&(of, owed)) = self.owed.get(next) {
            if table.is_some_and(|table| table != of) {
                next += 1;
                continue;
            }
            let outcome = outcome(&mut self.worker, &mut self.waits_for, now, owed.ticket())?;
            match owed {
                // What a server refused goes back, and the application goes on with it.
                Owed::Slabs(ticket) => match outcome {
                    Err(error) if !is_nan(&error) || self.program.nan_p == 0.0 => return Some(Err(error)),
                    outcome => {
                        for slab in self.worker.redeem_slabs(ticket) {
                            match outcome {
                                Ok(()) => self.stuck.remove(&slab.table()),
                                Err(_) => self.stuck.insert(slab.table()),
                            };
                            self.slabs.push(slab);
                        }
                    }
                },
                Owed::Rows(ticket) | Owed::Pushed(ticket) => {
                    if let Err(error) = outcome {
                        return Some(Err(error));
                    }
                    let values = self.worker.redeem(ticket);
                    if matches!(owed, Owed::Rows(_)) {
                        self.rows[of].1 = values;
                    }
                }
            }
            self.owed.remove(next);
        }
        Some(Ok(()))
    }

    /// Takes the memory of dense tables, where it is exchanged.
    fn take_slabs(&mut self) -> Result<(), WorkerError> {
        let dense = (0..).map(TableId).zip(&self.program.tables).filter(|(_, spec)| !spec.rows);
        for (table, _) in dense.filter(|_| self.program.slabs) {
            self.slabs.push(self.worker.slab(table)?);
        }
        Ok(())
    }

    /// Has the gradients of the step at hand computed, on what the application reads now.
    fn compute(&mut self) {
        if self.program.studies.is_none() {
            return;
        }
        let read = |(index, spec): (usize, &TableSpec)| match spec.rows {
            true => self.rows[index].1.clone(),
            false => self.values(TableId(index as u32)).expect("no table is elsewhere").to_vec(),
        };
        let parameters = self.program.tables.iter().enumerate().map(read).collect();
        if let Some(studies) = &mut self.program.studies {
            studies.begin(parameters);
        }
    }

    /// Pushes all tables, or those of the fragment whose turn it is, if it is one's.
    fn push(&mut self, now: Time) -> Result<State, WorkerError> {
        let Some(local) = &self.local else {
            self.push_those(now, &|_| true)?;
            self.worker.clock();
            return Ok(State::Waiting { since: now, pushes: false });
        };
        let (made, late, dealt) = (local.made, local.steps.late(), local.fragments.clone());
        let (fragment, turns) = (local.steps.pushed_after(made), local.steps.turns_after(made));
        let Some(fragment) = fragment else { return self.begin(now) };
        self.push_those(now, &|table| dealt[table] == fragment)?;
        if turns {
            self.worker.clock();
        }
        match &mut self.local {
            Some(local) if late > 0 => {
                local.in_flight[fragment].append(&mut self.owed);
                self.begin(now)
            }
            _ => Ok(State::Waiting { since: now, pushes: false }),
        }
    }

    /// Pushes some of the tables.
    fn push_those(&mut self, now: Time, wanted: &dyn Fn(usize) -> bool) -> Result<(), WorkerError> {
        for index in (0..self.program.tables.len()).filter(|index| wanted(*index)) {
            if !self.program.slabs || self.program.tables[index].rows {
                self.push_values(now, index)?;
            }
        }
        let is_wanted = |slab: &Slab| wanted(slab.table().0 as usize);
        let (slabs, others) = std::mem::take(&mut self.slabs).into_iter().partition::<Vec<_>, _>(is_wanted);
        self.slabs = others;
        if slabs.is_empty() { Ok(()) } else { self.push_slabs(now, slabs) }
    }

    /// Pushes one table.
    fn push_layer(&mut self, now: Time, index: usize) -> Result<(), WorkerError> {
        match self.slabs.iter().position(|slab| slab.table().0 as usize == index) {
            Some(place) => {
                let slab = self.slabs.remove(place);
                self.push_slabs(now, vec![slab])
            }
            None => self.push_values(now, index),
        }
    }

    fn push_values(&mut self, now: Time, index: usize) -> Result<(), WorkerError> {
        let nan = self.nan(index);
        let ticket = match self.push_table(now, index, nan) {
            // Nothing was sent: it is told to correct the gradient.
            Err(error) if nan && is_nan(&error) => self.push_table(now, index, false)?,
            pushed => pushed?,
        };
        self.owed.push((index, Owed::Pushed(ticket)));
        Ok(())
    }

    fn push_slabs(&mut self, now: Time, mut slabs: Vec<Slab>) -> Result<(), WorkerError> {
        let first = slabs.first().map_or(0, |slab| slab.table().0 as usize);
        let ticket = match self.exchange(now, &mut slabs, true) {
            Err(error) if is_nan(&error) => self.exchange(now, &mut slabs, false)?,
            exchanged => exchanged?,
        };
        self.owed.push((first, Owed::Slabs(ticket)));
        Ok(())
    }

    fn push_id(&self, table: TableId) -> PushId {
        let Program { seed, worker, .. } = self.program;
        PushId { seed, worker, clock: self.worker.current_clock(), table }
    }

    fn push_table(&mut self, now: Time, index: usize, nan: bool) -> Result<Ticket, WorkerError> {
        let (table, push) = (TableId(index as u32), self.push_id(TableId(index as u32)));
        let Program { tables, gradients, studies, .. } = &mut self.program;
        let (rows, values) = &self.rows[index];
        let mut computed = SCRATCH.take();
        computed.clear();
        if let Some(studies) = studies {
            computed.extend_from_slice(studies.gradient(now, index));
        } else if tables[index].rows {
            gradients.extend_rows(&push, rows, tables[index].row_elements(), values, &mut computed);
        } else {
            gradients.extend(&push, 0, self.worker.values(table), &mut computed);
        }
        if nan {
            spoil(&mut computed, push.clock);
        }
        let gradient = match tables[index].rows {
            true => Gradient::Rows { rows, values: &computed },
            false => Gradient::Dense(&computed),
        };
        let pushed = self.worker.push(now, table, gradient, !tables[index].rows);
        SCRATCH.set(computed);
        pushed
    }

    /// Exchanges slabs. They are empty afterwards, unless nothing was sent.
    fn exchange(
        &mut self,
        now: Time,
        slabs: &mut Vec<Slab>,
        may_have_nan: bool,
    ) -> Result<Ticket, WorkerError> {
        for slab in slabs.iter_mut() {
            let table = slab.table();
            let push = self.push_id(table);
            let mut computed = SCRATCH.take();
            computed.clear();
            match &mut self.program.studies {
                Some(studies) => {
                    computed.extend_from_slice(studies.gradient(now, table.0 as usize));
                }
                None => self.program.gradients.extend(&push, 0, slab.values(), &mut computed),
            }
            if may_have_nan && self.nan(table.0 as usize) {
                spoil(&mut computed, push.clock);
            }
            slab.gradient_mut().copy_from_slice(&computed);
            SCRATCH.set(computed);
        }
        self.worker.exchange(now, slabs)
    }

    /// Whether the gradient of a table has a NaN in this iteration.
    fn nan(&mut self, index: usize) -> bool {
        let Program { seed, worker, nan_p, .. } = self.program;
        let label = u64::from(worker.0) << 48 | (index as u64) << 40 | self.worker.current_clock();
        let is_nan = nan_p > 0.0 && Prng::fork(seed ^ 0x004e_614e, label).chance(nan_p);
        self.nans += u64::from(is_nan);
        is_nan
    }

    /// A digest of a dense table as the application reads it.
    fn digest(&self, index: usize) -> Option<u64> {
        let values = self.values(TableId(index as u32))?;
        Some(xxhash_rust::xxh3::xxh3_64(bytemuck::cast_slice(values)))
    }

    fn remember_read(&mut self, index: usize) {
        let table = TableId(index as u32);
        let is_known = |read: &[(TableId, u64)]| read.iter().any(|(known, _)| *known == table);
        if self.program.watches_memory
            && !is_known(&self.read)
            && let Some(digest) = self.digest(index)
        {
            self.read.push((table, digest));
        }
    }

    /// Nothing may have changed what the computation read of a table.
    fn compare_read(&mut self, index: usize) {
        let table = TableId(index as u32);
        let Some(place) = self.read.iter().position(|(known, _)| *known == table) else { return };
        let (_, known) = self.read.swap_remove(place);
        if self.digest(index).is_some_and(|digest| digest != known) {
            let name = &self.program.tables[index].name;
            let clock = self.worker.current_clock();
            self.torn = Some(format!("table `{name}` changed while iteration {clock} read it"));
        }
    }
}

/// Whether a gradient was refused for a NaN.
fn is_nan(error: &WorkerError) -> bool {
    matches!(error, WorkerError::NonFinite { .. } | WorkerError::Refused { cause: Cause::NonFinite, .. })
}

fn spoil(gradient: &mut [f32], clock: Clock) {
    if !gradient.is_empty() {
        let place = clock as usize % gradient.len();
        gradient[place] = f32::NAN;
    }
}

fn declare_and_start(now: Time, worker: &mut Worker, program: &Program) -> Result<Ticket, WorkerError> {
    for (index, spec) in program.tables.iter().enumerate() {
        let at = |element| program.gradients.initial(program.seed, TableId(index as u32), element);
        let initial = match &program.studies {
            Some(studies) => studies.initial(index),
            None => (0..spec.elements()).map(at).collect(),
        };
        worker.declare(spec.clone(), initial)?;
    }
    worker.start(now)
}

/// [`Worker::conclude`]. Until there is an outcome the application waits.
fn outcome(
    worker: &mut Worker,
    waits_for: &mut Option<Ticket>,
    now: Time,
    ticket: Ticket,
) -> Option<Result<(), WorkerError>> {
    let outcome = worker.conclude(now, ticket);
    if outcome.is_none() && *waits_for != Some(ticket) {
        worker.begin_wait(now, ticket);
        *waits_for = Some(ticket);
    } else if outcome.is_some() && waits_for.take_if(|waited| *waited == ticket).is_some() {
        worker.end_wait(now, ticket);
    }
    outcome
}

impl Role for Player {
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
        let destination = self.worker.landing(connection, header, frames, places)?;
        if self.program.canary == Some(Canary::Reused)
            && !self.read.iter().any(|(known, _)| *known == header.table)
            && let Some(region) = destination.region()
        {
            // The bug: what is received is read before all of it is here.
            let mut values: Vec<u8> = bytemuck::cast_slice(self.worker.values(header.table)).to_vec();
            // The values of a slab that is exchanged are nowhere else.
            let end = region.ranges().last().map_or(0, |range| range.end);
            values.resize(values.len().max(end), 0);
            for range in region.ranges() {
                values[range.clone()].copy_from_slice(region.bytes(range.clone()));
            }
            self.read.push((header.table, xxhash_rust::xxh3::xxh3_64(&values)));
        }
        Some(destination)
    }

    fn handle_landed(&mut self, now: Time, connection: ConnectionId, header: &Header) {
        self.worker.handle_landed(now, connection, header);
        self.play(now);
    }

    fn progress(&self, connection: ConnectionId) -> Option<u64> {
        self.worker.progress(connection)
    }

    fn handle_timeout(&mut self, now: Time) {
        self.worker.handle_timeout(now);
        self.play(now);
    }

    fn next_timeout(&self) -> Option<Time> {
        let judged = self.judged.as_ref().map(|(until, _)| *until);
        [self.worker.next_timeout(), self.computes_until(), judged].into_iter().flatten().min()
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
        match &self.torn {
            Some(what) => Err(what.clone()),
            None => self.worker.check(),
        }
    }
}
