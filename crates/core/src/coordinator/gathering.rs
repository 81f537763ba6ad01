//! What workers bring to a checkpoint: a file of each that keeps something from servers. The coordinator reads these in parts, one
//! after the other, so that they take no memory here, and has its archive keep them.

use crate::checkpoint::{SavedFile, WorkerFile, worker_file};
use crate::limits;
use crate::types::{Time, WorkerId};
use crate::wire::PartPlace;
use std::collections::BTreeMap;
use std::time::Duration;

/// A worker that is not at the checkpoint's clock so long after all servers were is taken as it is: rounds were closed without it.
const GRACE: Duration = Duration::from_secs(2);
/// A worker of which nothing comes for so long is left out of the checkpoint.
const PATIENCE: Duration = Duration::from_secs(30);

/// The files of workers for one checkpoint.
#[derive(Debug)]
pub(super) struct Gathering {
    folder: String,
    /// Files are brought here. Otherwise a command reads them where they are.
    is_kept: bool,
    /// Workers that were there when the checkpoint was ordered, but for those that have nothing to save.
    parts: BTreeMap<WorkerId, Part>,
    /// What comes at present.
    reading: Option<Reading>,
    /// Since when nothing happened that was waited for, once servers are done.
    waits_since: Option<Time>,
    /// Workers that are not at the clock were told not to wait for it.
    takes_all: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Awaited,
    /// The worker has it.
    Offered(SavedFile),
    Here(SavedFile),
}

/// A file on its way.
#[derive(Debug)]
struct Reading {
    worker: WorkerId,
    file: SavedFile,
    /// The first byte that is not here.
    start: u64,
    /// A part is being written.
    is_writing: bool,
}

/// What is to be done for a part that has come.
#[derive(Debug, PartialEq)]
pub(super) enum Arrival {
    /// Write it: it belongs to this file.
    Store(SavedFile),
    /// It is not what a worker announced.
    Damaged(String),
    /// It is not the part that was asked for.
    Unasked,
}

/// Workers that do not let a checkpoint be completed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Late {
    /// They are to be told not to wait for the clock.
    TakeAll(Vec<WorkerId>),
    /// They are left out.
    LeftOut(Vec<WorkerId>),
}

impl Gathering {
    pub(super) fn new(folder: &str, is_kept: bool) -> Gathering {
        Gathering {
            folder: folder.to_owned(),
            is_kept,
            parts: BTreeMap::new(),
            reading: None,
            waits_since: None,
            takes_all: false,
        }
    }

    /// These workers are told of the order.
    pub(super) fn expect(&mut self, workers: impl Iterator<Item = WorkerId>) {
        self.parts.extend(workers.map(|worker| (worker, Part::Awaited)));
    }

    /// A worker has a file, which is taken if it is what it has to be.
    pub(super) fn offer(&mut self, now: Time, worker: WorkerId, file: SavedFile) -> Result<(), String> {
        let Some(part) = self.parts.get_mut(&worker).filter(|part| **part == Part::Awaited) else {
            return Ok(());
        };
        if file.name != worker_file(worker) || !(1..=limits::MAX_WORKER_FILE_BYTES).contains(&file.bytes) {
            return Err(format!("it has a file `{}` of {} bytes", file.name.escape_debug(), file.bytes));
        }
        *part = if self.is_kept { Part::Offered(file) } else { Part::Here(file) };
        self.progress(now);
        Ok(())
    }

    /// A worker has nothing to save, or is not waited for any more.
    pub(super) fn leave_out(&mut self, now: Time, worker: WorkerId) {
        self.parts.remove(&worker);
        self.reading.take_if(|reading| reading.worker == worker);
        self.progress(now);
    }

    /// Whether the checkpoint needs a worker to be there: what it kept is not here yet. Without that the job would go on from
    /// something else than it was.
    pub(super) fn needs(&self, worker: WorkerId) -> bool {
        self.parts.get(&worker).is_some_and(|part| !self.is_kept || !matches!(part, Part::Here(_)))
    }

    /// Whether a worker has yet to say what it has.
    pub(super) fn awaits(&self, worker: WorkerId) -> bool {
        self.parts.get(&worker) == Some(&Part::Awaited)
    }

    /// The next part to be asked for, and of which worker.
    pub(super) fn next_read(&mut self) -> Option<(WorkerId, PartPlace)> {
        if self.reading.is_some() {
            return None;
        }
        let offered = |(worker, part): (&WorkerId, &Part)| match part {
            Part::Offered(file) => Some((*worker, file.clone())),
            Part::Awaited | Part::Here(_) => None,
        };
        let (worker, file) = self.parts.iter().find_map(offered)?;
        self.reading = Some(Reading { worker, file, start: 0, is_writing: false });
        self.asked()
    }

    /// The part that is asked for at present, for a worker that may not have heard it.
    pub(super) fn asked(&self) -> Option<(WorkerId, PartPlace)> {
        let Reading { worker, file, start, .. } =
            self.reading.as_ref().filter(|reading| !reading.is_writing)?;
        let (folder, file) = (self.folder.clone(), file.name.clone());
        Some((*worker, PartPlace { reader: 0, folder, file, start: *start }))
    }

    /// A worker has sent a part.
    pub(super) fn take(&mut self, now: Time, from: WorkerId, place: &PartPlace, bytes: usize) -> Arrival {
        if self.asked().is_none_or(|(worker, asked)| worker != from || asked != *place) {
            return Arrival::Unasked;
        }
        self.progress(now);
        let Some(reading) = &mut self.reading else { return Arrival::Unasked };
        let left = reading.file.bytes - reading.start;
        if bytes as u64 != left.min(limits::MAX_PART_BYTES as u64) {
            return Arrival::Damaged(format!("{bytes} bytes came where {left} are left"));
        }
        reading.is_writing = true;
        Arrival::Store(reading.file.clone())
    }

    /// A part is written: so many bytes of the file are here.
    pub(super) fn stored(&mut self, now: Time, place: &PartPlace, bytes: u64) {
        let is_it = |reading: &&mut Reading| {
            reading.is_writing && reading.file.name == place.file && reading.start == place.start
        };
        if *place.folder != self.folder {
            return;
        }
        let Some(reading) = self.reading.as_mut().filter(is_it) else { return };
        (reading.start, reading.is_writing) = (reading.start + bytes, false);
        if reading.start >= reading.file.bytes {
            self.parts.insert(reading.worker, Part::Here(reading.file.clone()));
            self.reading = None;
        }
        self.progress(now);
    }

    /// The files, once nobody is waited for.
    pub(super) fn files(&self) -> Option<Vec<WorkerFile>> {
        let file = |(worker, part): (&WorkerId, &Part)| match part {
            Part::Here(file) => Some(WorkerFile { worker: *worker, file: file.clone() }),
            Part::Awaited | Part::Offered(_) => None,
        };
        self.parts.iter().map(file).collect()
    }

    /// All servers are done: from now on workers have to be, too.
    pub(super) fn servers_are_done(&mut self, now: Time) {
        self.waits_since.get_or_insert(now);
    }

    /// Time has passed.
    pub(super) fn handle_timeout(&mut self, now: Time) -> Option<Late> {
        if self.next_timeout().is_none_or(|at| at > now) {
            return None;
        }
        let late = |part: &Part| !matches!(part, Part::Here(_));
        let late = self.parts.iter().filter(|(_, part)| late(part));
        if self.takes_all {
            let late: Vec<WorkerId> = late.map(|(worker, _)| *worker).collect();
            late.iter().for_each(|worker| self.leave_out(now, *worker));
            return Some(Late::LeftOut(late));
        }
        let awaited = late.filter(|(_, part)| **part == Part::Awaited).map(|(worker, _)| *worker).collect();
        self.takes_all = true;
        Some(Late::TakeAll(awaited))
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        let since = self.waits_since.filter(|_| self.files().is_none())?;
        Some(since + if self.takes_all { PATIENCE } else { GRACE })
    }

    fn progress(&mut self, now: Time) {
        self.waits_since = self.waits_since.map(|_| now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathering(workers: u32, is_kept: bool) -> Gathering {
        let mut gathering = Gathering::new("step", is_kept);
        gathering.expect((0..workers).map(WorkerId));
        gathering
    }

    fn file(worker: u32, bytes: u64) -> SavedFile {
        SavedFile { name: worker_file(WorkerId(worker)), bytes, digest: Default::default() }
    }

    fn ranks(gathering: &Gathering) -> Option<Vec<u32>> {
        Some(gathering.files()?.iter().map(|file| file.worker.0).collect())
    }

    #[test]
    fn files_are_read_one_after_the_other_and_each_part_once() {
        let (mut gathering, now, part) = (gathering(3, true), Time::ZERO, limits::MAX_PART_BYTES);
        assert_eq!(gathering.next_read(), None);
        gathering.offer(now, WorkerId(1), file(1, part as u64 + 5)).unwrap();
        gathering.offer(now, WorkerId(0), file(0, 7)).unwrap();
        gathering.leave_out(now, WorkerId(2));
        let (worker, place) = gathering.next_read().expect("something is offered");
        assert_eq!((worker, place.start, gathering.next_read()), (WorkerId(0), 0, None));
        assert_eq!(gathering.asked(), Some((worker, place.clone())));
        assert_eq!(gathering.take(now, WorkerId(1), &place, 7), Arrival::Unasked);
        assert_eq!(gathering.take(now, worker, &place, 7), Arrival::Store(file(0, 7)));
        assert_eq!(gathering.take(now, worker, &place, 7), Arrival::Unasked, "it came twice");
        gathering.stored(now, &place, 7);
        let mut lengths = Vec::new();
        while let Some((worker, place)) = gathering.next_read().or_else(|| gathering.asked()) {
            let bytes = part.min(part + 5 - place.start as usize);
            assert!(matches!(gathering.take(now, worker, &place, bytes), Arrival::Store(_)));
            assert_eq!(ranks(&gathering), None);
            gathering.stored(now, &place, bytes as u64);
            lengths.push(bytes);
        }
        assert_eq!((lengths, ranks(&gathering)), (vec![part, 5], Some(vec![0, 1])));
    }

    #[test]
    fn what_a_worker_says_of_its_file_is_checked() {
        let (mut gathering, now) = (gathering(1, true), Time::ZERO);
        for file in [file(1, 7), file(0, 0), file(0, limits::MAX_WORKER_FILE_BYTES + 1)] {
            assert!(gathering.offer(now, WorkerId(0), file).is_err());
        }
        gathering.offer(now, WorkerId(7), file(7, 1)).unwrap();
        gathering.offer(now, WorkerId(0), file(0, 7)).unwrap();
        let (worker, place) = gathering.next_read().expect("it is offered");
        assert!(matches!(gathering.take(now, worker, &place, 8), Arrival::Damaged(_)));
    }

    #[test]
    fn nobody_is_waited_for_for_ever() {
        let (mut gathering, at) = (gathering(3, true), Time::from_secs_f64);
        gathering.offer(at(0.0), WorkerId(0), file(0, 7)).unwrap();
        assert_eq!(gathering.next_timeout(), None, "servers are not done");
        gathering.servers_are_done(at(1.0));
        assert_eq!(gathering.handle_timeout(at(2.9)), None);
        let late = Late::TakeAll(vec![WorkerId(1), WorkerId(2)]);
        assert_eq!(gathering.handle_timeout(at(3.0)), Some(late));
        gathering.leave_out(at(20.0), WorkerId(2));
        assert_eq!(gathering.next_timeout(), Some(at(50.0)));
        let (_, place) = gathering.next_read().expect("the first one's");
        gathering.take(at(40.0), WorkerId(0), &place, 7);
        gathering.stored(at(41.0), &place, 7);
        assert_eq!(gathering.handle_timeout(at(71.0)), Some(Late::LeftOut(vec![WorkerId(1)])));
        assert_eq!((ranks(&gathering), gathering.next_timeout()), (Some(vec![0]), None));
    }

    #[test]
    fn a_command_reads_files_where_they_are_for_as_long_as_the_worker_is_there() {
        let (mut passing, now) = (gathering(2, false), Time::ZERO);
        passing.offer(now, WorkerId(0), file(0, 7)).unwrap();
        passing.offer(now, WorkerId(1), file(1, 7)).unwrap();
        assert_eq!((passing.next_read(), ranks(&passing)), (None, Some(vec![0, 1])));
        assert!(passing.needs(WorkerId(1)) && !passing.needs(WorkerId(2)));
        let mut kept = gathering(1, true);
        kept.offer(now, WorkerId(0), file(0, 7)).unwrap();
        let (worker, place) = kept.next_read().expect("it is offered");
        kept.take(now, worker, &place, 7);
        assert!(kept.needs(worker));
        kept.stored(now, &place, 7);
        assert!(!kept.needs(worker));
        assert_eq!(ranks(&kept), Some(vec![0]));
    }
}
