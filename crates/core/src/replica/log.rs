//! The log of a shard's inputs, for its copies.

use crate::limits;
use crate::role::{Body, Frame};
use crate::types::{CopyId, Time};
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
    entries: VecDeque<Arc<Vec<u8>>>,
    /// The number of the first of them.
    first: u64,
    /// So many entries were applied here.
    applied: u64,
    /// Copies, by their numbers.
    copies: BTreeMap<u32, Copy>,
    /// The copy of the process that served the shard before, which has yet to connect. It gates, as others do.
    awaited: Option<Copy>,
    /// That copy, if it came too late.
    refused: Option<CopyId>,
    /// By the number of its core: the newest order whose copy need not be waited for any more. It does not begin anew by itself: the
    /// coordinator would not hear of it.
    released: BTreeMap<u32, u64>,
    bytes: usize,
}

/// A copy, as the log knows it.
#[derive(Debug)]
struct Copy {
    id: CopyId,
    is_connected: bool,
    /// It has so many entries.
    has: u64,
    /// Bytes that were sent to it.
    sent: u64,
    /// From this entry on it is waited for.
    gates_from: Option<u64>,
    /// The shard rests until this copy has its image, but not for longer.
    rests_until: Option<Time>,
    /// The coordinator was told that it gates, and is in sync, as of this epoch.
    told: Option<u32>,
    /// Since when it lacks something that could be applied.
    lacks_since: Option<Time>,
    /// It is gone by the word of its own core.
    is_void: bool,
    /// The coordinator was told that it is out of reach.
    is_given_up: bool,
}

impl Log {
    /// A log without entries or copies.
    pub(super) fn is_empty(&self) -> bool {
        self.copies.is_empty() && self.awaited.is_none() && self.entries.is_empty()
    }

    fn all(&self) -> impl Iterator<Item = &Copy> {
        self.copies.values().chain(&self.awaited)
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Copy> {
        self.copies.values_mut().chain(&mut self.awaited)
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
        let (number, entry) = (self.next(), Arc::new(entry));
        self.bytes += entry.len();
        self.entries.push_back(entry.clone());
        for copy in self.all_mut() {
            copy.lacks_since.get_or_insert(now);
            copy.sent += if copy.is_connected { entry.len() as u64 } else { 0 };
        }
        let connected = self.copies.iter().filter(|(_, copy)| copy.is_connected);
        connected.map(|(id, _)| (*id, entry_frame(number, &entry))).collect()
    }

    /// The next entry that may be applied here.
    pub(super) fn take_ready(&mut self) -> Option<Arc<Vec<u8>>> {
        if self.is_applied() || !self.all().all(|copy| copy.allows(self.applied, self.bytes)) {
            return None;
        }
        let entry = self.entries[(self.applied - self.first) as usize].clone();
        self.applied += 1;
        self.forget();
        Some(entry)
    }

    /// Drops entries that are applied here, and that all copies have.
    fn forget(&mut self) {
        let needed = self.all().map(|copy| copy.has).min().unwrap_or(self.applied).min(self.applied);
        while self.first < needed
            && let Some(entry) = self.entries.pop_front()
        {
            self.bytes -= entry.len();
            self.first += 1;
        }
    }

    /// Whether a copy that has so many entries can go on from there.
    pub(super) fn can_resume(&self, number: u32, id: CopyId, has: u64) -> bool {
        let known = self.copies.get(&number).is_some_and(|copy| copy.id == id);
        known && (self.first..=self.next()).contains(&has)
    }

    /// The process that served the shard before keeps a copy of it, which lacks these entries that were applied here when the shard was taken
    /// over, and nothing else. It is waited for from the first moment on, since the coordinator counts on it.
    pub(super) fn await_former(&mut self, now: Time, id: CopyId, epoch: u32, entries: Vec<Vec<u8>>) {
        let has = self.next();
        self.bytes += entries.iter().map(Vec::len).sum::<usize>();
        self.entries.extend(entries.into_iter().map(Arc::new));
        self.applied = self.next();
        self.awaited = Some(Copy {
            id,
            is_connected: false,
            has,
            sent: 0,
            gates_from: Some(has),
            rests_until: None,
            told: Some(epoch),
            lacks_since: Some(now),
            is_void: false,
            is_given_up: false,
        });
    }

    /// A core connects that may have the copy which is waited for.
    pub(super) fn meet(&mut self, number: u32, id: CopyId) {
        if let Some(copy) = self.awaited.take_if(|copy| copy.id == id) {
            self.copies.insert(number, copy);
        }
    }

    /// A core asks to begin a copy. Whether it may. What it kept by an earlier order is gone by its own word, and the coordinator, which has
    /// given it another, counts on that no more.
    pub(super) fn admit(&mut self, number: u32, id: CopyId) -> bool {
        let is_released = self.released.get(&number).is_some_and(|order| *order >= id.order);
        if is_released || self.refused == Some(id) {
            return false;
        }
        match self.copies.get_mut(&number) {
            // It has lost what the coordinator counts on, and has to be told so before anything happens that this copy lacks.
            Some(copy) if copy.id == id && copy.gates_from.is_some() && copy.rests_until.is_none() => {
                copy.is_void = true;
                false
            }
            Some(copy) if copy.id.order > id.order => false,
            Some(_) => {
                self.copies.remove(&number);
                self.forget();
                true
            }
            None => true,
        }
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

    /// The number of the first entry of a log from an epoch on: entries of different logs have different numbers.
    pub(super) fn first_of(epoch: u32) -> u64 {
        u64::from(epoch) << 32
    }

    /// The log of a shard that is served here from an epoch on.
    pub(super) fn of_epoch(epoch: u32) -> Log {
        let first = Log::first_of(epoch);
        Log { first, applied: first, ..Log::default() }
    }

    /// A copy begins with an image of the shard as it is now, of so many bytes. Everything must be applied. The shard may rest meanwhile,
    /// because it moves: then nothing but the image is sent. Returns the number of the entry that follows.
    pub(super) fn begin(&mut self, number: u32, id: CopyId, image: usize, rests_until: Option<Time>) -> u64 {
        if self.is_empty() {
            // Inputs were applied without being logged.
            self.first += 1;
            self.applied = self.first;
        }
        let has = self.next();
        let copy = Copy {
            id,
            is_connected: true,
            has,
            sent: image as u64,
            gates_from: rests_until.map(|_| has),
            rests_until,
            told: None,
            lacks_since: None,
            is_void: false,
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
        // The image is there. From now on the shard is as one whose copy is in sync.
        copy.rests_until = None;
        copy.lacks_since = (has < next).then_some(now);
        if copy.gates_from.is_none() {
            let sent = (has.saturating_sub(first) as usize).min(self.entries.len());
            let behind: usize = self.entries.iter().skip(sent).map(|entry| entry.len()).sum();
            // From the next entry on, once little is missing.
            copy.gates_from = (behind <= limits::MAX_LOG_BYTES / 16).then_some(next);
        }
        self.forget();
    }

    /// A copy that has come to be in sync, once, and the bytes that were sent to it: the coordinator is to be told.
    pub(super) fn poll_in_sync(&mut self, epoch: u32) -> Option<(CopyId, u64)> {
        let is_new = |copy: &&mut Copy| {
            let is_in_sync = copy.gates_from.is_some_and(|from| copy.has >= from);
            copy.told.is_none() && copy.rests_until.is_none() && is_in_sync && !copy.is_void
        };
        let copy = self.all_mut().find(is_new)?;
        copy.told = Some(epoch);
        Some((copy.id, copy.sent))
    }

    /// The coordinator may not have heard of copies that are in sync.
    pub(super) fn tell_again(&mut self) {
        self.all_mut().for_each(|copy| (copy.told, copy.is_given_up) = (None, false));
    }

    /// A copy that is gone, or holds inputs up for too long, once.
    pub(super) fn poll_lost(&mut self, now: Time) -> Option<CopyId> {
        let is_over = |copy: &Copy| copy.is_void || copy.deadline().is_some_and(|at| at <= now);
        let is_lost = |copy: &&mut Copy| !copy.is_given_up && is_over(copy);
        let copy = self.all_mut().find(is_lost)?;
        copy.is_given_up = true;
        Some(copy.id)
    }

    /// When [`Log::poll_lost`] or [`Log::rouse`] is to be asked.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let lost = self.all().filter(|copy| !copy.is_given_up).filter_map(Copy::deadline);
        lost.chain(self.copies.values().filter_map(|copy| copy.rests_until)).min()
    }

    /// Whether the shard rests: nobody is taken in meanwhile.
    pub(super) fn is_resting(&self) -> bool {
        self.copies.values().any(|copy| copy.rests_until.is_some())
    }

    /// A shard that has rested for too long goes on; copies follow by the log.
    pub(super) fn rouse(&mut self, now: Time) {
        let overdue = |copy: &&mut Copy| copy.rests_until.is_some_and(|until| until <= now);
        for copy in self.copies.values_mut().filter(overdue) {
            (copy.rests_until, copy.gates_from) = (None, None);
        }
    }

    /// The connection to a copy is gone. One that gates is waited for; another is forgotten.
    pub(super) fn lose(&mut self, number: u32) {
        if let Some(copy) = self.copies.get_mut(&number) {
            copy.is_connected = false;
            // The coordinator has not heard of one that the shard rests for.
            if copy.gates_from.is_none() || copy.rests_until.is_some() {
                self.copies.remove(&number);
                self.forget();
            }
        }
    }

    /// The coordinator says which copy can take over since an epoch: others that it was told of before do not gate any more.
    /// Returns these. One that it is told of since counts there, and may be given the shard.
    pub(super) fn keep(&mut self, kept: Option<CopyId>, since: u32) -> Vec<u32> {
        let is_over = |copy: &Copy| {
            let was_told = copy.told.is_some_and(|told| told < since);
            Some(copy.id) != kept && (was_told || copy.is_given_up)
        };
        let over: Vec<(u32, u64)> = self
            .copies
            .iter()
            .filter(|(_, copy)| is_over(copy))
            .map(|(number, copy)| (*number, copy.id.order))
            .collect();
        for (number, order) in &over {
            self.copies.remove(number);
            self.released.insert(*number, *order);
        }
        let former = self.awaited.take_if(|copy| is_over(copy));
        self.refused = former.map(|copy| copy.id).or(self.refused);
        self.forget();
        over.into_iter().map(|(number, _)| number).collect()
    }

    /// There are no copies any more.
    pub(super) fn close(&mut self) {
        self.copies.clear();
        self.awaited = None;
    }

    /// How many entries are applied here, and those that are not: a copy may have them.
    pub(super) fn into_unapplied(mut self) -> (u64, VecDeque<Arc<Vec<u8>>>) {
        self.entries.drain(..(self.applied - self.first) as usize);
        (self.applied, self.entries)
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

    fn deadline(&self) -> Option<Time> {
        self.gates_from.filter(|_| self.rests_until.is_none())?;
        Some(self.lacks_since? + limits::COPY_PATIENCE)
    }
}

fn entry_frame(number: u64, entry: &Arc<Vec<u8>>) -> Frame {
    let header = Header { request: number, payload_bytes: entry.len() as u32, ..Header::new(Kind::Entry) };
    Frame { header, body: Body::Logged(entry.clone()) }
}
