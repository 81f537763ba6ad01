//! Readers: they receive what is broadcast, and nobody waits for them.

use crate::limits;
use crate::prng::Prng;
use crate::standstill::Standstill;
use crate::status::{ReaderStatus, WorkerReport};
use crate::types::{Clock, NodeId, ServerId, TableId, Time, WorkerId};
use crate::wire::{Plan, Refusal, Welcome, control};
use std::collections::BTreeMap;
use std::time::Duration;

/// The readers that are connected. A number is never given twice, so that one that comes back has its own.
#[derive(Debug)]
pub(super) struct Readers {
    secret: u64,
    next: u32,
    connected: BTreeMap<WorkerId, Reader>,
}

#[derive(Debug)]
struct Reader {
    last_heard: Time,
    /// The plan was sent on this connection.
    informed: bool,
    report: WorkerReport,
}

impl Readers {
    /// Incarnations follow from `secret`.
    pub(super) fn new(secret: u64) -> Readers {
        Readers { secret, next: 0, connected: BTreeMap::new() }
    }

    /// How many numbers were given.
    pub(super) fn given(&self) -> u32 {
        self.next
    }

    /// Goes on after so many numbers. Some may have been given after that, of which nothing is remembered: as many as there may be readers are
    /// left to these.
    pub(super) fn restore(&mut self, given: u32) {
        self.next = given.saturating_add(limits::MAX_READERS as u32);
    }

    /// The incarnation of a reader: which process has its number.
    pub(super) fn incarnation(&self, id: WorkerId) -> Option<u64> {
        let number = id.reader_number()?;
        Some(Prng::fork(self.secret, u64::from(number)).next_u64().max(1))
    }

    /// A reader says hello: a new one, or one that was here before.
    pub(super) fn accept(
        &mut self,
        now: Time,
        incarnation: u64,
        wanted: Option<WorkerId>,
    ) -> Result<Welcome, Refusal> {
        let known = wanted.filter(|id| id.reader_number().is_some_and(|number| number < self.next));
        let id = match (wanted, known) {
            (None, _) => WorkerId::reader(self.next),
            (Some(_), Some(id)) if self.incarnation(id) == Some(incarnation) => id,
            _ => {
                let reason = "this reader belongs to a job that ended; start it anew".into();
                return Err(Refusal { reason, retry: false });
            }
        };
        if self.connected.len() >= limits::MAX_READERS && !self.connected.contains_key(&id) {
            let reason = format!("the job has {} readers, and takes no more", limits::MAX_READERS);
            return Err(Refusal { reason, retry: true });
        }
        self.next += u32::from(known.is_none());
        let reader = Reader { last_heard: now, informed: false, report: WorkerReport::default() };
        self.connected.insert(id, reader);
        let incarnation = self.incarnation(id).unwrap_or(0);
        Ok(Welcome { you: NodeId::Worker(id), incarnation, session: 0 })
    }

    /// A reader says something. Whether it was told the plan on this connection; `None` for one that is not here.
    pub(super) fn heard(&mut self, now: Time, id: WorkerId) -> Option<bool> {
        let reader = self.connected.get_mut(&id)?;
        reader.last_heard = now;
        Some(reader.informed)
    }

    /// The plan is sent to a reader. Whether it was not sent on this connection before.
    pub(super) fn inform(&mut self, id: WorkerId) -> bool {
        self.connected.get_mut(&id).is_some_and(|reader| !std::mem::replace(&mut reader.informed, true))
    }

    /// Keeps of a reader's words what its status tells: it may say much else.
    pub(super) fn take_report(&mut self, id: WorkerId, report: WorkerReport) {
        if let Some(reader) = self.connected.get_mut(&id) {
            let WorkerReport { clock, bytes_pulled, waiting, .. } = report;
            let waiting = waiting.map(control::sentence);
            reader.report = WorkerReport { clock, bytes_pulled, waiting, ..WorkerReport::default() };
        }
    }

    /// A reader is gone. Whether it was here.
    pub(super) fn remove(&mut self, id: WorkerId) -> bool {
        self.connected.remove(&id).is_some()
    }

    /// How many there are, for the job's phase.
    pub(super) fn words(&self) -> String {
        match self.ids().count() {
            0 => String::new(),
            1 => "; 1 reader".into(),
            count => format!("; {count} readers"),
        }
    }

    /// All that are connected, by number.
    pub(super) fn ids(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.connected.keys().copied()
    }

    /// Those that know the plan, by number.
    pub(super) fn informed(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.connected.iter().filter(|(_, reader)| reader.informed).map(|(id, _)| *id)
    }

    /// The version that a reader has.
    pub(super) fn version(&self, id: WorkerId) -> Option<Clock> {
        self.connected.get(&id)?.report.clock.checked_sub(1)
    }

    pub(super) fn statuses(&self, now: Time) -> Vec<ReaderStatus> {
        let status = |(id, reader): (&WorkerId, &Reader)| ReaderStatus {
            reader: id.reader_number().unwrap_or(0),
            version: self.version(*id),
            silent_seconds: now.since(reader.last_heard).as_secs_f64(),
            bytes_received: reader.report.bytes_pulled,
            waiting: reader.report.waiting.clone(),
        };
        self.connected.iter().map(status).collect()
    }

    pub(super) fn last_heard_mut(&mut self) -> impl Iterator<Item = &mut Time> {
        self.connected.values_mut().map(|reader| &mut reader.last_heard)
    }

    /// Those that were silent for so long.
    pub(super) fn silent(&self, now: Time, grace: Duration, standstill: &Standstill) -> Vec<WorkerId> {
        let is_over = |reader: &Reader| standstill.deadline(reader.last_heard, grace) <= now;
        self.connected.iter().filter(|(_, reader)| is_over(reader)).map(|(id, _)| *id).collect()
    }

    /// When [`Readers::silent`] is to be asked.
    pub(super) fn next_deadline(&self, grace: Duration, standstill: &Standstill) -> Option<Time> {
        self.connected.values().map(|reader| standstill.deadline(reader.last_heard, grace)).min()
    }
}

/// Why a job's tables cannot be read, if some of them cannot.
pub(super) fn refusal(plan: &Plan) -> Option<String> {
    (0..).map(TableId).zip(&plan.tables).find_map(|(number, table)| {
        let name = &table.name;
        if !plan.policy_of(number, ServerId(0)).is_broadcast() {
            return Some(format!(
                "table `{name}` is not broadcast, so that it cannot be read; start the job with a `broadcast` other than `none`, \
                 such as `--broadcast star`"
            ));
        }
        // Versions of rows leave out chunks, so that a reader could not tell which it lacks.
        table.rows.then(|| format!("table `{name}` is one of rows, and readers take dense tables only"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Time = Time(0);
    const GRACE: Duration = Duration::from_secs(10);

    fn join(readers: &mut Readers) -> (WorkerId, u64) {
        let Welcome { you, incarnation, .. } = readers.accept(START, 0, None).unwrap();
        let NodeId::Worker(id) = you else { panic!("{you:?}") };
        (id, incarnation)
    }

    #[test]
    fn a_reader_keeps_its_number_and_nobody_else_gets_it() {
        let mut readers = Readers::new(42);
        let (first, incarnation) = join(&mut readers);
        assert_eq!((first, first.is_reader()), (WorkerId::reader(0), true));
        assert!(readers.inform(first) && !readers.inform(first));
        assert!(readers.remove(first) && !readers.remove(first));
        let (second, other) = join(&mut readers);
        assert_eq!(second, WorkerId::reader(1));
        assert_ne!(incarnation, other);
        let back = readers.accept(START, incarnation, Some(first)).unwrap();
        assert_eq!(back, Welcome { you: NodeId::Worker(first), incarnation, session: 0 });
        assert_eq!(readers.heard(START, first), Some(false), "it may have missed changes");
        assert_eq!(readers.ids().collect::<Vec<_>>(), [first, second]);
        for (wanted, number) in [(first, other), (WorkerId::reader(2), incarnation), (WorkerId(0), 0)] {
            let refusal = readers.accept(START, number, Some(wanted)).unwrap_err();
            assert!(!refusal.retry && refusal.reason.contains("a job that ended"), "{refusal:?}");
        }
    }

    #[test]
    fn there_are_so_many_readers_and_no_more() {
        let mut readers = Readers::new(1);
        let (first, incarnation) = join(&mut readers);
        (1..limits::MAX_READERS).for_each(|_| assert!(join(&mut readers).0.is_reader()));
        let refusal = readers.accept(START, 0, None).unwrap_err();
        assert!(refusal.retry && refusal.reason.contains("1024 readers"), "{refusal:?}");
        assert!(readers.accept(START, incarnation, Some(first)).is_ok(), "it has a place");
        readers.remove(first);
        assert_eq!(join(&mut readers).0, WorkerId::reader(limits::MAX_READERS as u32));
    }

    #[test]
    fn silent_readers_are_found_and_the_status_says_what_they_have() {
        let (mut readers, standstill) = (Readers::new(1), Standstill::default());
        let (first, _) = join(&mut readers);
        let (second, _) = join(&mut readers);
        assert_eq!(readers.next_deadline(GRACE, &standstill), Some(START + GRACE));
        let later = START + Duration::from_secs(4);
        assert_eq!(readers.heard(later, second), Some(false));
        assert_eq!(readers.silent(START + GRACE, GRACE, &standstill), [first]);
        readers.take_report(second, WorkerReport { clock: 8, bytes_pulled: 5, ..WorkerReport::default() });
        let statuses = readers.statuses(later);
        // Whatever else it says is not kept.
        let (waiting, links) = (Some("x".repeat(1 << 20)), Some(crate::status::LinksReport::default()));
        readers.take_report(first, WorkerReport { waiting, links, ..WorkerReport::default() });
        let kept = &readers.connected[&first].report;
        assert_eq!(kept.links.as_ref(), None);
        assert_eq!(kept.waiting.as_ref().map(String::len), Some(limits::MAX_REASON_BYTES));
        assert_eq!(statuses.iter().map(|status| status.version).collect::<Vec<_>>(), [None, Some(7)]);
        assert_eq!((statuses[0].silent_seconds, statuses[1].bytes_received), (4.0, 5));
    }
}
