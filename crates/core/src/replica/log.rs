//! The log of a shard's inputs, for its copies.

use crate::limits;
use crate::role::{Body, Frame};
use crate::types::{ProcessId, Time};
use crate::wire::{Header, Kind};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Inputs in order, which of them are applied here, and which of them each copy has.
///
/// A copy that has caught up *gates* the shard: no input is applied here before that copy has it. So whatever the shard has
/// acknowledged, answered or changed, the copy can go on from. A gate is opened by the coordinator alone, which else might give the
/// shard to a copy that lacks something.
#[derive(Debug, Default)]
pub(super) struct Log {
    entries: VecDeque<Arc<[u8]>>,
    /// The number of the first of them.
    first: u64,
    /// So many entries were applied here.
    applied: u64,
    /// Copies, by their numbers.
    copies: BTreeMap<u32, Copy>,
    bytes: usize,
}

/// A copy, as the log knows it.
#[derive(Debug)]
struct Copy {
    process: ProcessId,
    is_connected: bool,
    /// It has so many entries.
    has: u64,
    /// From this entry on it is waited for.
    gates_from: Option<u64>,
    /// The coordinator was told that it gates, and is in sync.
    is_told: bool,
    /// Since when it lacks something that could be applied.
    lacks_since: Option<Time>,
    /// The coordinator was told that it is out of reach.
    is_given_up: bool,
}

impl Log {
    /// A log without entries or copies.
    pub(super) fn is_empty(&self) -> bool {
        self.copies.is_empty() && self.entries.is_empty()
    }

    /// The number of the entry that comes next.
    fn next(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// So many entries were applied here.
    pub(super) fn applied(&self) -> u64 {
        self.applied
    }

    /// Whether everything that was logged is applied.
    pub(super) fn is_applied(&self) -> bool {
        self.applied == self.next()
    }

    /// Takes an entry. Returns the frames that bring it to the copies.
    pub(super) fn append(&mut self, now: Time, entry: Vec<u8>) -> Vec<(u32, Frame)> {
        let (number, entry) = (self.next(), Arc::<[u8]>::from(entry));
        self.bytes += entry.len();
        self.entries.push_back(entry.clone());
        for copy in self.copies.values_mut() {
            copy.lacks_since.get_or_insert(now);
        }
        let connected = self.copies.iter().filter(|(_, copy)| copy.is_connected);
        connected.map(|(id, _)| (*id, entry_frame(number, &entry))).collect()
    }

    /// The next entry that may be applied here.
    pub(super) fn take_ready(&mut self) -> Option<Arc<[u8]>> {
        if self.is_applied() || !self.copies.values().all(|copy| copy.allows(self.applied, self.bytes)) {
            return None;
        }
        let entry = self.entries[(self.applied - self.first) as usize].clone();
        self.applied += 1;
        self.forget();
        Some(entry)
    }

    /// Drops entries that are applied here, and that all copies have.
    fn forget(&mut self) {
        let needed =
            self.copies.values().map(|copy| copy.has).min().unwrap_or(self.applied).min(self.applied);
        while self.first < needed
            && let Some(entry) = self.entries.pop_front()
        {
            self.bytes -= entry.len();
            self.first += 1;
        }
    }

    /// Whether a copy that has so many entries can go on from there.
    pub(super) fn can_resume(&self, number: u32, process: ProcessId, has: u64) -> bool {
        let known = self.copies.get(&number).is_some_and(|copy| copy.process == process);
        known && (self.first..=self.next()).contains(&has)
    }

    /// A copy is connected again. Returns the frames that it lacks.
    pub(super) fn resume(&mut self, now: Time, number: u32, has: u64) -> Vec<Frame> {
        let Some(copy) = self.copies.get_mut(&number) else { return Vec::new() };
        (copy.is_connected, copy.lacks_since) = (true, Some(now));
        self.note(now, number, has);
        let skipped = has.saturating_sub(self.first) as usize;
        let lacking = self.entries.iter().enumerate().skip(skipped);
        lacking.map(|(at, entry)| entry_frame(self.first + at as u64, entry)).collect()
    }

    /// A copy begins with an image of the shard as it is now. Everything must be applied. Returns the number of the entry that follows.
    pub(super) fn begin(&mut self, number: u32, process: ProcessId) -> u64 {
        let has = self.next();
        let copy = Copy {
            process,
            is_connected: true,
            has,
            gates_from: None,
            is_told: false,
            lacks_since: None,
            is_given_up: false,
        };
        self.copies.insert(number, copy);
        has
    }

    /// A copy has so many entries.
    pub(super) fn note(&mut self, now: Time, number: u32, has: u64) {
        let (first, next) = (self.first, self.next());
        let Some(copy) = self.copies.get_mut(&number) else { return };
        // A copy's claim to have what was not sent is not believed.
        if has < copy.has || has > next {
            return;
        }
        copy.has = has;
        copy.lacks_since = (has < next).then_some(now);
        let sent = (has.saturating_sub(first) as usize).min(self.entries.len());
        let behind: usize = self.entries.iter().skip(sent).map(|entry| entry.len()).sum();
        copy.gate_when_near(next, behind);
        self.forget();
    }

    /// The process of a copy that has come to be in sync, once: the coordinator is to be told.
    pub(super) fn poll_in_sync(&mut self) -> Option<ProcessId> {
        let is_new = |copy: &&mut Copy| !copy.is_told && copy.gates_from.is_some_and(|from| copy.has >= from);
        let copy = self.copies.values_mut().find(is_new)?;
        copy.is_told = true;
        Some(copy.process)
    }

    /// The coordinator may not have heard of copies that are in sync.
    pub(super) fn tell_again(&mut self) {
        self.copies.values_mut().for_each(|copy| (copy.is_told, copy.is_given_up) = (false, false));
    }

    /// The process of a copy that holds inputs up for too long, once.
    pub(super) fn poll_lost(&mut self, now: Time) -> Option<ProcessId> {
        let is_lost = |copy: &&mut Copy| !copy.is_given_up && copy.deadline().is_some_and(|at| at <= now);
        let copy = self.copies.values_mut().find(is_lost)?;
        copy.is_given_up = true;
        Some(copy.process)
    }

    /// When [`Log::poll_lost`] is to be asked.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.copies.values().filter(|copy| !copy.is_given_up).filter_map(Copy::deadline).min()
    }

    /// The connection to a copy is gone. One that gates is waited for; another is forgotten.
    pub(super) fn lose(&mut self, number: u32) {
        if let Some(copy) = self.copies.get_mut(&number) {
            copy.is_connected = false;
            if copy.gates_from.is_none() {
                self.copies.remove(&number);
                self.forget();
            }
        }
    }

    /// The coordinator says which process' copy can take over: others that it was told of do not gate any more. Returns these.
    pub(super) fn keep(&mut self, process: Option<ProcessId>) -> Vec<u32> {
        let is_over = |copy: &Copy| Some(copy.process) != process && (copy.is_told || copy.is_given_up);
        let over: Vec<u32> =
            self.copies.iter().filter(|(_, copy)| is_over(copy)).map(|(id, _)| *id).collect();
        for id in &over {
            self.copies.remove(id);
        }
        self.forget();
        over
    }

    /// There are no copies any more.
    pub(super) fn close(&mut self) {
        self.copies.clear();
    }

    /// The copies that are connected.
    pub(super) fn connected(&self) -> impl Iterator<Item = u32> + '_ {
        self.copies.iter().filter(|(_, copy)| copy.is_connected).map(|(id, _)| *id)
    }

    /// Compares the counts with what they count.
    pub(super) fn check(&self) -> Result<(), String> {
        let bytes: usize = self.entries.iter().map(|entry| entry.len()).sum();
        if bytes != self.bytes {
            return Err(format!("a log has {bytes} bytes, and {} are counted", self.bytes));
        }
        if !(self.first..=self.next()).contains(&self.applied) {
            return Err("more of a log is applied than there is".into());
        }
        Ok(())
    }
}

impl Copy {
    /// Whether an entry may be applied without this copy having it.
    fn allows(&self, entry: u64, log_bytes: usize) -> bool {
        let waits = match self.gates_from {
            Some(from) => entry >= from,
            // A copy that cannot follow slows the shard down: else the log would grow without end.
            None => log_bytes > limits::MAX_LOG_BYTES,
        };
        !waits || entry < self.has
    }

    /// Gates from the next entry on, once little is missing.
    fn gate_when_near(&mut self, next: u64, behind: usize) {
        if self.gates_from.is_none() && behind <= limits::MAX_LOG_BYTES / 16 {
            self.gates_from = Some(next);
        }
    }

    fn deadline(&self) -> Option<Time> {
        self.gates_from?;
        Some(self.lacks_since? + limits::COPY_PATIENCE)
    }
}

fn entry_frame(number: u64, entry: &Arc<[u8]>) -> Frame {
    let header = Header { request: number, payload_bytes: entry.len() as u32, ..Header::new(Kind::Entry) };
    Frame { header, body: Body::Counted(entry.clone()) }
}
