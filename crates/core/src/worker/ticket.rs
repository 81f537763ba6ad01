//! Tickets: handles that the application waits on.

use super::WorkerError;
use super::request::Request;
use super::slab::SlabInFlight;
use super::waiting::{Arrivals, Waiting};
use crate::policy::JobPolicies;
use crate::status::Status;
use crate::types::{Clock, ShardId, Time, WorkerId};
use crate::waits::{Delay, WaitCause, Waited};
use std::collections::BTreeMap;
use std::time::Duration;

/// Something the application can wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub(super) u64);

/// Kind of a ticket; made into a sentence for a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TicketKind {
    Start,
    Push {
        table: usize,
        clock: Clock,
    },
    Pull {
        table: usize,
        clock: Clock,
    },
    Exchange {
        clock: Clock,
        tables: usize,
    },
    Barrier(String),
    Status,
    Policies,
    Leave,
    /// A reader waits for a version.
    Version(Clock),
}

/// State of a ticket.
#[derive(Debug)]
pub(super) struct Pending {
    kind: TicketKind,
    since: Time,
    expected: Expected,
    /// Loose ones are not waited for once the worker may go on with the iteration after so many (PSP).
    partial: Option<Clock>,
    /// The iteration that the application computes on what it brings.
    reads: Option<Clock>,
    /// Of some tables a copy that is fresh enough for that iteration will do, whoever brought it.
    takes_copy: bool,
    /// How long the application waited for it, before the wait at hand.
    waited: Duration,
    waits_since: Option<Time>,
    /// The application has gone on.
    is_over: bool,
    error: Option<WorkerError>,
    rows: Vec<f32>,
    status: Option<Status>,
    policies: Option<Box<JobPolicies>>,
    slabs: Vec<SlabInFlight>,
    arrivals: Arrivals,
}

/// Servers' messages that a ticket still waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Outstanding {
    pub(super) acks: usize,
    pub(super) answers: usize,
}

/// How a ticket waits for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// Whatever happens.
    Firm,
    /// Until the worker may go on without it (PSP).
    Loose,
    /// Until the table's copy is fresh enough, whoever brought it (SSP's cache).
    Copied,
}

/// What a ticket still waits for, by how it waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Expected {
    pub(super) firm: Outstanding,
    pub(super) loose: Outstanding,
    pub(super) copied: Outstanding,
}

impl Expected {
    pub(super) fn of(&mut self, claim: Claim) -> &mut Outstanding {
        match claim {
            Claim::Firm => &mut self.firm,
            Claim::Loose => &mut self.loose,
            Claim::Copied => &mut self.copied,
        }
    }

    /// Adds what is to come of a request.
    pub(super) fn add(&mut self, request: &Request) {
        let outstanding = self.of(request.claim());
        outstanding.acks += usize::from(request.wants_ack());
        outstanding.answers += usize::from(request.wants_params());
    }
}

/// Results of a ticket, beside its outcome.
#[derive(Debug, Default)]
pub(super) struct Brought {
    pub(super) rows: Vec<f32>,
    pub(super) slabs: Vec<SlabInFlight>,
}

/// Tickets that the application has not redeemed.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    /// Boxed: a map takes memory for eleven at once, and one or two are the rule.
    pending: BTreeMap<Ticket, Box<Pending>>,
    made: u64,
    /// The last one of a push.
    last_push: Option<Ticket>,
    start: Option<Ticket>,
    leaving: Option<Ticket>,
    statuses: Vec<Ticket>,
    policies: Vec<Ticket>,
    waiting: Waiting,
}

impl TicketKind {
    /// A sentence about the wait. `name` names a table.
    pub(super) fn sentence<'a>(&self, name: impl Fn(usize) -> &'a str) -> String {
        match self {
            TicketKind::Start => "the job to start".into(),
            TicketKind::Push { table, clock } => {
                format!("the push of table `{}` at clock {clock}", name(*table))
            }
            TicketKind::Pull { table, clock } => {
                format!("the pull of table `{}` after clock {clock}", name(*table))
            }
            TicketKind::Exchange { clock, tables } => {
                format!("the exchange of {tables} tables at clock {clock}")
            }
            TicketKind::Barrier(name) => format!("barrier `{name}`"),
            TicketKind::Status => "the job's status".into(),
            TicketKind::Policies => "the job's policies".into(),
            TicketKind::Leave => "the coordinator to note that this worker leaves".into(),
            TicketKind::Version(version) => format!("version {version} of all tables"),
        }
    }
}

impl Pending {
    pub(super) fn new(kind: TicketKind, since: Time) -> Pending {
        Pending {
            kind,
            since,
            expected: Expected::default(),
            partial: None,
            reads: None,
            takes_copy: false,
            waited: Duration::ZERO,
            waits_since: None,
            is_over: false,
            error: None,
            rows: Vec::new(),
            status: None,
            policies: None,
            slabs: Vec::new(),
            arrivals: Arrivals::default(),
        }
    }

    /// It waits for so many acknowledgements and answers.
    pub(super) fn expecting(self, acks: usize, answers: usize) -> Pending {
        self.expecting_each(Expected { firm: Outstanding { acks, answers }, ..Expected::default() })
    }

    /// The same, and for others as long as the worker may not go on.
    pub(super) fn expecting_each(mut self, expected: Expected) -> Pending {
        self.expected = expected;
        self
    }

    /// Rows that the answers bring go here.
    pub(super) fn with_rows(mut self, rows: Vec<f32>) -> Pending {
        self.rows = rows;
        self
    }

    /// It need not wait for all answers once the worker may go on with this iteration.
    pub(super) fn with_partial(mut self, clock: Option<Clock>) -> Pending {
        self.partial = clock;
        self
    }

    /// It brings what an iteration is computed on.
    pub(super) fn read_by(mut self, clock: Clock) -> Pending {
        self.reads = Some(clock);
        self
    }

    /// It need not wait for its own answers once the copies of its tables are fresh enough for the iteration that it is for.
    pub(super) fn with_copy(mut self, takes_copy: bool) -> Pending {
        self.takes_copy = takes_copy;
        self
    }

    /// The iteration that is computed on what it brings.
    pub(super) fn reads(&self) -> Option<Clock> {
        self.reads
    }

    /// The iteration that a copy has to be fresh enough for, where one will do.
    pub(super) fn copy_for(&self) -> Option<Clock> {
        self.reads.filter(|_| self.takes_copy)
    }

    /// Whether it may be due before all that is under way for it is over.
    pub(super) fn may_end_early(&self) -> bool {
        self.partial.is_some() || self.copy_for().is_some()
    }

    /// The application waits for it from now on.
    pub(super) fn begin_wait(&mut self, now: Time) {
        self.waits_since.get_or_insert(now);
    }

    /// Whether the application has gone on.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// The application goes on; how long it has waited.
    pub(super) fn end(&mut self, now: Time) -> Duration {
        self.is_over = true;
        self.stop_wait(now);
        self.waited
    }

    /// The application waits no more.
    pub(super) fn stop_wait(&mut self, now: Time) {
        self.waited += self.waits_since.take().map_or(Duration::ZERO, |since| now.since(since));
    }

    /// One more answer is to come, for which a copy will do.
    pub(super) fn expect_copy(&mut self) {
        self.expected.copied.answers += 1;
    }

    /// The table that it is about, where it is about one.
    fn table(&self) -> Option<usize> {
        match self.kind {
            TicketKind::Push { table, .. } | TicketKind::Pull { table, .. } => Some(table),
            _ => None,
        }
    }

    /// The tables that it is about.
    pub(super) fn tables(&self) -> impl Iterator<Item = usize> {
        let slabs = self.slabs.iter().map(|slab| slab.table.0 as usize);
        self.table().into_iter().chain(slabs)
    }

    /// Those of them of which a copy will do.
    pub(super) fn copied_tables(&self) -> impl Iterator<Item = usize> {
        let slabs = self.slabs.iter().filter(|slab| slab.takes_copy()).map(|slab| slab.table.0 as usize);
        self.table().filter(|_| self.takes_copy).into_iter().chain(slabs)
    }

    /// The slabs that its exchange has.
    pub(super) fn slabs(&self) -> &[SlabInFlight] {
        &self.slabs
    }

    /// Slabs that come back with it.
    pub(super) fn with_slabs(mut self, slabs: Vec<SlabInFlight>) -> Pending {
        self.slabs = slabs;
        self
    }

    pub(super) fn kind(&self) -> &TicketKind {
        &self.kind
    }

    pub(super) fn since(&self) -> Time {
        self.since
    }

    pub(super) fn partial(&self) -> Option<Clock> {
        self.partial
    }

    pub(super) fn error(&self) -> Option<&WorkerError> {
        self.error.as_ref()
    }

    /// Whether servers have still to say something.
    pub(super) fn is_open(&self) -> bool {
        self.expected != Expected::default()
    }

    /// Whether it has to wait for some of that, whatever the worker may do.
    pub(super) fn is_firmly_open(&self) -> bool {
        self.expected.firm != Outstanding::default()
    }

    /// Whether it has to wait for some of that until the worker may go on without it.
    pub(super) fn is_loosely_open(&self) -> bool {
        self.expected.loose != Outstanding::default()
    }

    /// Whether some of that is more than an acknowledgement.
    pub(super) fn awaits_answers(&self) -> bool {
        self.expected.firm.answers + self.expected.loose.answers > 0 || self.takes_copy
    }

    pub(super) fn acknowledged(&mut self, claim: Claim) {
        let acks = &mut self.expected.of(claim).acks;
        *acks = acks.saturating_sub(1);
    }

    pub(super) fn answered(&mut self, claim: Claim) {
        let answers = &mut self.expected.of(claim).answers;
        *answers = answers.saturating_sub(1);
    }

    /// The first error counts.
    pub(super) fn fail(&mut self, error: WorkerError) {
        self.error.get_or_insert(error);
    }

    pub(super) fn rows(&self) -> &[f32] {
        &self.rows
    }

    pub(super) fn rows_mut(&mut self) -> &mut [f32] {
        &mut self.rows
    }
}

impl Tickets {
    /// The number of the next ticket.
    pub(super) fn reserve(&mut self) -> Ticket {
        self.made += 1;
        Ticket(self.made)
    }

    /// Files a ticket under a number that was reserved.
    pub(super) fn file(&mut self, ticket: Ticket, pending: Pending) {
        if matches!(pending.kind, TicketKind::Push { .. } | TicketKind::Exchange { .. }) {
            self.last_push = Some(ticket);
        }
        self.pending.insert(ticket, Box::new(pending));
    }

    pub(super) fn open(&mut self, pending: Pending) -> Ticket {
        let ticket = self.reserve();
        self.file(ticket, pending);
        ticket
    }

    /// The ticket of `start`, under which initial values are exchanged.
    pub(super) fn open_start(&mut self, now: Time) -> Ticket {
        // One answer is outstanding until the plan is here and says what else is.
        let ticket = self.open(Pending::new(TicketKind::Start, now).expecting(0, 1));
        self.start = Some(ticket);
        ticket
    }

    pub(super) fn start(&self) -> Option<Ticket> {
        self.start
    }

    pub(super) fn open_leave(&mut self, now: Time) -> Ticket {
        let ticket = self.open(Pending::new(TicketKind::Leave, now).expecting(0, 1));
        self.leaving = Some(ticket);
        ticket
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    /// The coordinator has noted that this worker leaves.
    pub(super) fn left(&mut self) {
        if let Some(ticket) = self.leaving.take() {
            self.answered(ticket);
        }
    }

    /// A reader waits for a version.
    pub(super) fn open_version(&mut self, now: Time, version: Clock) -> Ticket {
        self.open(Pending::new(TicketKind::Version(version), now).expecting(0, 1))
    }

    /// A reader has a version, and so whatever waits for it or for earlier ones is due.
    pub(super) fn reach_version(&mut self, reached: Clock) {
        for pending in self.pending.values_mut() {
            if matches!(pending.kind, TicketKind::Version(version) if version <= reached) {
                pending.expected = Expected::default();
            }
        }
    }

    pub(super) fn open_status(&mut self, now: Time) -> Ticket {
        let ticket = self.open(Pending::new(TicketKind::Status, now).expecting(0, 1));
        self.statuses.push(ticket);
        ticket
    }

    pub(super) fn wants_status(&self) -> bool {
        !self.statuses.is_empty()
    }

    /// Gives the status to all tickets that asked for it.
    pub(super) fn set_status(&mut self, status: &Status) {
        for ticket in std::mem::take(&mut self.statuses) {
            if let Some(pending) = self.pending.get_mut(&ticket) {
                pending.status = Some(status.clone());
                pending.answered(Claim::Firm);
            }
        }
    }

    pub(super) fn take_status(&mut self, ticket: Ticket) -> Option<Status> {
        self.pending.get_mut(&ticket)?.status.take()
    }

    pub(super) fn open_policies(&mut self, now: Time) -> Ticket {
        let ticket = self.open(Pending::new(TicketKind::Policies, now).expecting(0, 1));
        self.policies.push(ticket);
        ticket
    }

    pub(super) fn wants_policies(&self) -> bool {
        !self.policies.is_empty()
    }

    /// Gives the job's policies to all tickets that asked for them.
    pub(super) fn set_policies(&mut self, policies: &JobPolicies) {
        for ticket in std::mem::take(&mut self.policies) {
            if let Some(pending) = self.pending.get_mut(&ticket) {
                pending.policies = Some(Box::new(policies.clone()));
                pending.answered(Claim::Firm);
            }
        }
    }

    pub(super) fn take_policies(&mut self, ticket: Ticket) -> Option<JobPolicies> {
        self.pending.get_mut(&ticket)?.policies.take().map(|policies| *policies)
    }

    pub(super) fn get(&self, ticket: Ticket) -> Option<&Pending> {
        self.pending.get(&ticket).map(|pending| &**pending)
    }

    pub(super) fn get_mut(&mut self, ticket: Ticket) -> Option<&mut Pending> {
        self.pending.get_mut(&ticket).map(|pending| &mut **pending)
    }

    pub(super) fn contains(&self, ticket: Ticket) -> bool {
        self.pending.contains_key(&ticket)
    }

    pub(super) fn answered(&mut self, ticket: Ticket) {
        self.get_mut(ticket).into_iter().for_each(|pending| pending.answered(Claim::Firm));
    }

    /// A ticket that waits for so many acknowledgements and answers, if it was not given up.
    pub(super) fn expect(&mut self, ticket: Ticket, acks: usize, answers: usize) {
        if let Some(pending) = self.pending.get_mut(&ticket) {
            pending.expected.firm = Outstanding { acks, answers };
        }
    }

    pub(super) fn fail(&mut self, ticket: Ticket, error: WorkerError) {
        if let Some(pending) = self.pending.get_mut(&ticket) {
            pending.fail(error);
        }
    }

    /// Tickets for which copies will do, and that the application has not gone on from.
    pub(super) fn awaiting_copies(&self) -> impl Iterator<Item = (Ticket, &Pending)> {
        let open = self.pending.iter().filter(|(_, pending)| pending.takes_copy && !pending.is_over);
        open.map(|(ticket, pending)| (*ticket, &**pending))
    }

    /// A thread of the application begins to wait for a ticket.
    pub(super) fn begin_wait(&mut self, now: Time, ticket: Ticket) {
        self.waiting.begin(now);
        if let Some(pending) = self.get_mut(ticket) {
            pending.arrivals.wait(now);
        }
    }

    /// Whether the application waits at a barrier, and has pushed nothing since it came there.
    pub(super) fn is_at_barrier(&self) -> bool {
        let since = self.pending.iter().filter(|(ticket, _)| Some(**ticket) > self.last_push);
        let mut barriers = since.filter(|(_, pending)| matches!(pending.kind, TicketKind::Barrier(_)));
        barriers.any(|(_, pending)| pending.expected.firm.answers > 0 && pending.arrivals.is_waited_for())
    }

    /// A thread of the application waits no more.
    pub(super) fn end_wait(&mut self, now: Time) {
        self.waiting.end(now);
    }

    /// Charges what was waited for a ticket that is due.
    pub(super) fn charge(&mut self, ticket: Ticket, me: Option<WorkerId>) {
        if let Some(pending) = self.pending.get(&ticket) {
            self.waiting.charge(&pending.arrivals, pending.since, me);
        }
    }

    /// Nothing that a ticket waits for could come until now, for this cause.
    pub(super) fn hold(&mut self, ticket: Ticket, cause: WaitCause, now: Time) {
        if let Some(pending) = self.get_mut(ticket) {
            pending.arrivals.hold(cause, now);
        }
    }

    /// The same for all tickets of an exchange after this clock.
    pub(super) fn hold_clock(&mut self, clock: Clock, cause: WaitCause, now: Time) {
        let is_its = |kind: &TicketKind| match kind {
            TicketKind::Push { clock: of, .. } | TicketKind::Exchange { clock: of, .. } => *of == clock,
            TicketKind::Pull { clock: of, .. } => of.checked_sub(1) == Some(clock),
            _ => false,
        };
        let its = self.pending.values_mut().filter(|pending| is_its(&pending.kind));
        its.for_each(|pending| pending.arrivals.hold(cause, now));
    }

    /// A shard has acknowledged a request of a ticket.
    pub(super) fn acknowledged(&mut self, ticket: Ticket, from: ShardId, now: Time, claim: Claim) {
        self.arrived(ticket, from, now, None);
        self.get_mut(ticket).into_iter().for_each(|pending| pending.acknowledged(claim));
    }

    /// A shard has answered a request of a ticket, or acknowledged it.
    pub(super) fn arrived(&mut self, ticket: Ticket, from: ShardId, now: Time, delay: Option<Delay>) {
        if let Some(pending) = self.get_mut(ticket) {
            pending.arrivals.note(from.server, now, delay);
        }
    }

    /// Counts waiting time up to now.
    pub(super) fn count_wait(&mut self, now: Time) {
        self.waiting.count(now);
    }

    /// How long the application waited, and for whom.
    pub(super) fn waited(&self) -> Waited {
        self.waiting.report()
    }

    /// Forgets a ticket.
    pub(super) fn redeem(&mut self, ticket: Ticket) -> Brought {
        let pending = self.pending.remove(&ticket).map(|pending| *pending);
        pending.map_or_else(Brought::default, |Pending { rows, slabs, .. }| Brought { rows, slabs })
    }

    /// Those that servers have still to say something to, oldest first.
    pub(super) fn open_ones(&self) -> impl Iterator<Item = Ticket> {
        self.pending.iter().filter(|(_, pending)| pending.is_open()).map(|(ticket, _)| *ticket)
    }

    /// Bytes that gradients of slabs under way take.
    pub(super) fn memory_bytes(&self) -> usize {
        self.pending.values().flat_map(|pending| &pending.slabs).map(SlabInFlight::memory_bytes).sum()
    }

    /// What tickets wait for against what is to come of their requests. One that has failed waits for nothing, and `start`
    /// waits for the plan first.
    pub(super) fn check(&self, is_planned: bool, to_come: impl Fn(Ticket) -> Expected) -> Result<(), String> {
        self.waiting.check()?;
        let is_counted = |pending: &Pending| match pending.kind {
            TicketKind::Push { .. } | TicketKind::Pull { .. } | TicketKind::Exchange { .. } => true,
            TicketKind::Start => is_planned,
            TicketKind::Barrier(_) | TicketKind::Status | TicketKind::Policies | TicketKind::Leave => false,
            TicketKind::Version(_) => false,
        };
        for (ticket, pending) in &self.pending {
            if !is_counted(pending) || pending.error.is_some() {
                continue;
            }
            let (said, to_come) = (pending.expected, to_come(*ticket));
            if said != to_come {
                return Err(format!("{:?} waits for {said:?}, and {to_come:?} is to come", pending.kind));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{JobSize, MovesStatus};

    const NONE: Outstanding = Outstanding { acks: 0, answers: 0 };
    const NOTHING: Expected = Expected { firm: NONE, loose: NONE, copied: NONE };

    fn push() -> Pending {
        Pending::new(TicketKind::Push { table: 0, clock: 3 }, Time(5))
    }

    #[test]
    fn a_ticket_is_open_until_the_last_thing_that_it_waits_for() {
        let mut tickets = Tickets::default();
        let [first, second] =
            [(1, 1), (0, 1)].map(|(acks, answers)| tickets.open(push().expecting(acks, answers)));
        assert_eq!(tickets.open_ones().next(), Some(first));
        tickets.answered(first);
        assert_eq!(tickets.open_ones().next(), Some(first));
        tickets.get_mut(first).unwrap().acknowledged(Claim::Firm);
        assert_eq!(
            (tickets.open_ones().next(), tickets.get(first).unwrap().is_open()),
            (Some(second), false)
        );
        tickets.answered(first);
        assert!(!tickets.get(first).unwrap().is_open(), "what is said once more changes nothing");
        tickets.redeem(second);
        assert_eq!((tickets.contains(second), tickets.open_ones().next()), (false, None));
    }

    #[test]
    fn the_first_error_of_a_ticket_counts() {
        let mut tickets = Tickets::default();
        let ticket = tickets.open(push());
        ["first", "second"].into_iter().for_each(|why| tickets.fail(ticket, WorkerError::Order(why.into())));
        assert_eq!(tickets.get(ticket).unwrap().error(), Some(&WorkerError::Order("first".into())));
    }

    #[test]
    fn everybody_who_asks_for_the_policies_gets_them_once() {
        let mut tickets = Tickets::default();
        let asked = [0, 1].map(|at| tickets.open_policies(Time(at)));
        assert!(tickets.wants_policies());
        tickets.set_policies(&JobPolicies::default());
        assert!(!tickets.wants_policies() && tickets.open_ones().next().is_none());
        for ticket in asked {
            assert_eq!(tickets.take_policies(ticket), Some(JobPolicies::default()));
            assert_eq!(tickets.take_policies(ticket), None);
        }
    }

    #[test]
    fn everybody_who_asks_for_the_status_gets_it_once() {
        let status = Status {
            job: "job".into(),
            phase: "training".into(),
            size: JobSize { workers: 1, servers: 1 },
            epoch: 1,
            restarts: 0,
            workers: vec![],
            readers: vec![],
            receivers: vec![],
            served: Vec::new(),
            moves: MovesStatus::default(),
            shards: vec![],
            packs: vec![],
            aggregators: vec![],
            warnings: vec![],
            waited: Default::default(),
            stalled: vec![],
        };
        let mut tickets = Tickets::default();
        assert!(!tickets.wants_status());
        let asked = [0, 1].map(|at| tickets.open_status(Time(at)));
        assert!(tickets.wants_status());
        tickets.set_status(&status);
        assert!(!tickets.wants_status() && tickets.open_ones().next().is_none());
        for ticket in asked {
            assert_eq!(tickets.take_status(ticket).as_ref(), Some(&status));
            assert_eq!(tickets.take_status(ticket), None);
        }
    }

    #[test]
    fn a_ticket_says_what_is_waited_for() {
        let sentence = |kind: TicketKind| kind.sentence(|_| "w");
        for (kind, words) in [
            (TicketKind::Start, "the job to start"),
            (TicketKind::Push { table: 0, clock: 3 }, "the push of table `w` at clock 3"),
            (TicketKind::Pull { table: 0, clock: 3 }, "the pull of table `w` after clock 3"),
            (TicketKind::Exchange { clock: 3, tables: 2 }, "the exchange of 2 tables at clock 3"),
            (TicketKind::Barrier("eval".into()), "barrier `eval`"),
            (TicketKind::Status, "the job's status"),
            (TicketKind::Policies, "the job's policies"),
            (TicketKind::Leave, "the coordinator to note that this worker leaves"),
        ] {
            assert_eq!(sentence(kind), words);
        }
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let mut tickets = Tickets::default();
        let one = Expected { firm: Outstanding { acks: 1, answers: 0 }, ..NOTHING };
        let ticket = tickets.open(push().expecting(1, 0));
        assert_eq!(tickets.check(true, |_| one), Ok(()));
        assert!(tickets.check(true, |_| NOTHING).is_err(), "nothing is to come");
        tickets.fail(ticket, WorkerError::Order("it was refused".into()));
        assert_eq!(tickets.check(true, |_| NOTHING), Ok(()), "one that failed waits for nothing");
        let mut tickets = Tickets::default();
        tickets.open_start(Time::ZERO);
        assert_eq!(tickets.check(false, |_| NOTHING), Ok(()), "its requests are made when the plan is here");
        assert!(tickets.check(true, |_| NOTHING).is_err());
        tickets.redeem(tickets.start().unwrap());
        tickets.open_leave(Time::ZERO);
        assert_eq!(tickets.check(true, |_| NOTHING), Ok(()), "the coordinator answers, no server");
    }
}
