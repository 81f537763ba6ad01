//! Small tables that travel as layers of one: their gradients are gathered, and leave together.
//!
//! A table costs a worker and a shard as much as some thousand additions, whatever its size. The application need not
//! know: each of its tables is a [`Member`] of a [`Gathering`], and its handles are [`Passage`]s, which know their ticket once the
//! pack has left. A pack never waits for a gradient that may not come: when somebody waits for parameters or at a barrier, all packs
//! leave with what they have, since other workers may need that to go on.

use super::error::ClientError;
use super::hands::Threads;
use super::shared::{Shared, lock};
use super::table::{Place, Table};
use crate::clock;
use paramill_core::kernels;
use paramill_core::policy::{Axis, JobPolicies};
use paramill_core::registry::Registry;
use paramill_core::table::{Layer, Pack, TableSpec};
use paramill_core::types::{ServerId, TableId};
use paramill_core::worker::{Gradient, PullOptions, Ticket, WorkerError};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

/// Tables of more elements are worth their own requests.
const SMALL: u64 = 4096;
/// With fewer small tables there is nothing to gain, and simple programs need not know of packs.
const FEWEST: usize = 8;
/// A sentence names so many of a pack's tables.
const NAMED: usize = 5;

fn is_small(spec: &TableSpec) -> bool {
    !spec.alone && !spec.rows && !spec.is_pack() && spec.elements() <= SMALL
}

/// Whether there are enough small tables for packs.
pub(super) fn gains(tables: &[Table]) -> bool {
    tables.iter().filter(|table| is_small(table.spec())).count() >= FEWEST
}

/// All tables, the small ones in packs; empty where every table stays by itself.
pub(super) fn divide(tables: &[Table], policies: &JobPolicies, registry: &Registry) -> Vec<Pack> {
    // Fragments are pushed one by one, and a pack leaves as a whole.
    let has_fragments =
        policies.policy.local(registry).is_ok_and(|local| local.is_some_and(|local| local.fragments() > 1));
    let spec = |table: &Table| {
        let spec = table.spec().clone();
        let of_name = spec.policy_on(ServerId(0), &policies.policy, &policies.overrides);
        // The matrices whose product a gradient is are those of a whole table.
        if has_fragments || of_name.get(Axis::Codec).contains("factors") { spec.alone() } else { spec }
    };
    let are_alike = |one: &TableSpec, other: &TableSpec| policies.are_alike(registry, one, other);
    let packs = Pack::divide(tables.iter().map(spec), SMALL, are_alike);
    if packs.len() == tables.len() { Vec::new() } else { packs }
}

/// The packs of a job.
#[derive(Debug)]
pub(super) struct Packs(Vec<Arc<Gathering>>);

impl Packs {
    /// For those who wait.
    pub(super) fn departures(&self) -> Departures {
        Departures(self.0.iter().map(Arc::downgrade).collect())
    }

    /// Tells tables where they are.
    pub(super) fn settle(shared: &Arc<Shared>, tables: &[Table], packs: &[Pack]) -> Packs {
        let mut gatherings = Vec::new();
        for (id, pack) in (0..).map(TableId).zip(packs) {
            if let [single] = pack.tensors() {
                tables[single.number].settle(Place::Own(id));
                continue;
            }
            let gathering = Arc::new(Gathering::new(shared.clone(), id, pack.spec().clone()));
            for (layer, tensor) in pack.tensors().iter().enumerate() {
                let member = Member { pack: gathering.clone(), layer };
                tables[tensor.number].settle(Place::Layer(member));
            }
            gatherings.push(gathering);
        }
        Packs(gatherings)
    }

    /// Lets all packs leave that have something. Until the result is dropped nothing is added to them.
    pub(super) fn leave(&self) -> Rounds<'_> {
        // Whoever locks several does so in this order.
        let mut rounds: Vec<MutexGuard<'_, Round>> = self.0.iter().map(|pack| lock(&pack.round)).collect();
        self.0.iter().zip(&mut rounds).for_each(|(pack, round)| pack.leave(round));
        Rounds(rounds)
    }
}

/// The packs of a job, as its other parts know them: packs know the job.
#[derive(Debug)]
pub(super) struct Departures(Vec<Weak<Gathering>>);

impl Departures {
    /// Lets all packs leave that have something.
    pub(super) fn leave(&self) {
        for pack in self.0.iter().filter_map(Weak::upgrade) {
            pack.leave(&mut lock(&pack.round));
        }
    }
}

/// The rounds of all packs of a job, at a moment when nothing is added to them.
pub(super) struct Rounds<'a>(Vec<MutexGuard<'a, Round>>);

impl Rounds<'_> {
    /// A new iteration has begun.
    pub(super) fn turn(&mut self) {
        self.0.iter_mut().for_each(|round| round.turn());
    }
}

/// A pack, and the gradients that are given to its tables.
#[derive(Debug)]
struct Gathering {
    shared: Arc<Shared>,
    id: TableId,
    spec: TableSpec,
    /// Locked before the worker is.
    round: Mutex<Round>,
}

/// One iteration of a pack.
#[derive(Debug)]
struct Round {
    gradient: Vec<f32>,
    /// For each layer, whether its gradient was given in this iteration.
    given: Vec<bool>,
    count: usize,
    /// Whether parameters are asked for with the push.
    wants: bool,
    has_left: bool,
    /// Gradients that have not left.
    push: Option<Arc<Departure>>,
    /// What is pulled after them, in either way.
    follows: [Option<Arc<Departure>>; 2],
    /// Pulls that others may share.
    pulls: [Weak<Departure>; 2],
}

impl Round {
    /// Nothing is given.
    fn turn(&mut self) {
        self.given.fill(false);
        (self.count, self.wants, self.has_left) = (0, false, false);
        self.pulls = Default::default();
    }
}

/// A request of a pack, which several tables' handles stand for.
#[derive(Debug)]
struct Departure {
    shared: Arc<Shared>,
    /// Set when it has left, or failed to.
    left: OnceLock<Result<Ticket, ClientError>>,
    /// Whether somebody has looked for its end: those who ask later want to know more.
    is_seen: AtomicBool,
}

impl Departure {
    fn new(shared: &Arc<Shared>) -> Departure {
        Departure { shared: shared.clone(), left: OnceLock::new(), is_seen: AtomicBool::new(false) }
    }

    fn set(&self, left: Result<Ticket, ClientError>) {
        // It leaves once: the round is locked.
        let _ = self.left.set(left);
    }
}

impl Drop for Departure {
    fn drop(&mut self) {
        if let Some(Ok(ticket)) = self.left.get() {
            self.shared.lock_landed(*ticket).worker.redeem(*ticket);
        }
    }
}

/// A table's part in a request of its pack.
#[derive(Debug)]
pub(super) struct Passage {
    pack: Arc<Gathering>,
    departure: Arc<Departure>,
}

impl Passage {
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.pack.shared
    }

    pub(super) fn has_left(&self) -> bool {
        self.departure.left.get().is_some()
    }

    /// The request's ticket. The pack leaves, if it has not.
    pub(super) fn ticket(&self) -> Result<Ticket, ClientError> {
        self.departure.is_seen.store(true, Ordering::Relaxed);
        if !self.has_left() {
            self.pack.leave(&mut lock(&self.pack.round));
        }
        match self.departure.left.get() {
            Some(Ok(ticket)) => Ok(*ticket),
            Some(Err(ClientError::Worker(why))) => Err(why.clone().into()),
            Some(Err(ClientError::Ended(why))) => Err(ClientError::Ended(why.clone())),
            Some(Err(why)) => Err(ClientError::Ended(why.to_string())),
            None => Err(WorkerError::Order("this handle's gradient was not sent".into()).into()),
        }
    }
}

/// A table that is a layer of a pack.
#[derive(Debug)]
pub(super) struct Member {
    pack: Arc<Gathering>,
    layer: usize,
}

impl Member {
    /// The pack.
    pub(super) fn table(&self) -> TableId {
        self.pack.id
    }

    /// Its elements in the pack.
    pub(super) fn range(&self) -> Range<usize> {
        range_of(&self.pack.spec.layers[self.layer])
    }

    /// Adds a gradient to those of the current clock.
    pub(super) fn send(&self, gradient: Gradient<'_>, wants: bool) -> Result<Passage, ClientError> {
        let Member { pack, layer } = self;
        let (Gradient::Dense(values) | Gradient::Rows { values, .. } | Gradient::Product { values, .. }) =
            gradient;
        let is_finite = kernels::all_finite(values);
        let mut round = lock(&pack.round);
        pack.shared.act(|worker| worker.check_layer(pack.id, *layer, &gradient, is_finite))?;
        self.check_turn(&mut round)?;
        round.gradient[self.range()].copy_from_slice(values);
        round.given[*layer] = true;
        round.count += 1;
        round.wants |= wants;
        let departure = round.push.get_or_insert_with(|| Arc::new(Departure::new(&pack.shared))).clone();
        if round.count == round.given.len() {
            pack.leave(&mut round);
        }
        Ok(Passage { pack: pack.clone(), departure })
    }

    /// Asks for the pack's parameters: those that follow this table's gradient, where that is yet to leave.
    pub(super) fn pull(&self, now: bool) -> Result<Passage, ClientError> {
        let Member { pack, layer } = self;
        let mut round = lock(&pack.round);
        let passage = |departure| Ok(Passage { pack: pack.clone(), departure });
        if round.push.is_some() && round.given[*layer] {
            let follows = &mut round.follows[usize::from(now)];
            return passage(follows.get_or_insert_with(|| Arc::new(Departure::new(&pack.shared))).clone());
        }
        let pulls = &mut round.pulls[usize::from(now)];
        if let Some(departure) = pulls.upgrade().filter(|it| !it.is_seen.load(Ordering::Relaxed)) {
            return passage(departure);
        }
        let departure = Arc::new(Departure::new(&pack.shared));
        departure.set(Ok(pack.pull(now)?));
        *pulls = Arc::downgrade(&departure);
        passage(departure)
    }

    /// Memory of one table of a pack is not lent.
    pub(super) fn refuse_loan(&self) -> Result<(), ClientError> {
        let sentence = format!(
            "table `{}` is not lent as a slab, as it travels with other small tables ({}): create it `alone`",
            self.name(),
            self.others()
        );
        Err(WorkerError::Order(sentence).into())
    }

    fn name(&self) -> &str {
        &self.pack.spec.layers[self.layer].name
    }

    /// The pack's other tables, for a sentence.
    fn others(&self) -> String {
        let layers = self.pack.spec.layers.iter().enumerate();
        let others = layers.filter(|(number, _)| *number != self.layer).map(|(_, layer)| &layer.name);
        let named: Vec<String> = others.take(NAMED).map(|name| format!("`{name}`")).collect();
        let more = self.pack.spec.layers.len() - 1 - named.len();
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        format!("{}{more}", named.join(", "))
    }

    /// A table is given one gradient in an iteration, before the pack leaves.
    fn check_turn(&self, round: &mut Round) -> Result<(), ClientError> {
        if !round.has_left && !round.given[self.layer] {
            return Ok(());
        }
        let clock = {
            let worker = &self.pack.shared.lock().worker;
            if round.has_left && !worker.has_pushed(self.pack.id) {
                // A server refused it, or it could not be sent: it may be given again, corrected or later.
                round.turn();
                return Ok(());
            }
            worker.current_clock()
        };
        let name = self.name();
        let sentence = match round.given[self.layer] {
            true => {
                format!("table `{name}` was pushed at clock {clock} already; call `clock` between iterations")
            }
            false => format!(
                "table `{name}` is given its gradient too late: those of the small tables that it travels with ({}) \
                 have left at clock {clock}; give all gradients before waiting for one, or create the table `alone`",
                self.others()
            ),
        };
        Err(WorkerError::Order(sentence).into())
    }
}

impl Gathering {
    fn new(shared: Arc<Shared>, id: TableId, spec: TableSpec) -> Gathering {
        let round = Round {
            gradient: vec![0.0; spec.elements() as usize],
            given: vec![false; spec.layers.len()],
            count: 0,
            wants: false,
            has_left: false,
            push: None,
            follows: Default::default(),
            pulls: Default::default(),
        };
        Gathering { shared, id, spec, round: Mutex::new(round) }
    }

    /// Sends the gradients that are given, and asks for what is to follow them. Errors are for those who wait for one.
    fn leave(&self, round: &mut Round) {
        let Some(push) = round.push.take() else { return };
        push.set(self.push(round));
        round.has_left = true;
        // Those were asked for before the push.
        round.pulls = Default::default();
        for (now, follows) in [false, true].into_iter().zip(&mut round.follows) {
            if let Some(pull) = follows.take() {
                pull.set(self.pull(now));
            }
        }
    }

    fn push(&self, round: &mut Round) -> Result<Ticket, ClientError> {
        let mut lacks: Vec<Range<usize>> = Vec::new();
        for (layer, _) in self.spec.layers.iter().zip(&round.given).filter(|(_, given)| !**given) {
            let range = range_of(layer);
            round.gradient[range.clone()].fill(0.0);
            match lacks.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => lacks.push(range),
            }
        }
        let (gradient, wants) = (Gradient::Dense(&round.gradient), round.wants);
        let mut submission = self.shared.act(|worker| worker.begin_push(self.id, gradient, lacks, wants))?;
        submission.prepare(&Threads::of_one_job());
        self.shared.act(|worker| worker.finish(clock::now(), &mut submission))
    }

    fn pull(&self, now: bool) -> Result<Ticket, ClientError> {
        let options = PullOptions { rows: None, now };
        self.shared.act(|worker| worker.pull(clock::now(), self.id, options))
    }
}

fn range_of(layer: &Layer) -> Range<usize> {
    layer.start as usize..(layer.start + layer.elements()) as usize
}
