//! Broadcast: the versions of a table on one shard as a stream of frames, and who follows it.
//!
//! A version is one frame for each chunk, in order ([`Update`]): its new values, or what a codec made of the difference to the
//! version before. Of a table of rows there are only the chunks in which something changed, each with the rows that did, and a
//! last frame that lists these chunks. Who has the chunks (the shard, or a worker that passes them on) keeps a [`Stream`] of them. A receiver
//! says which version it has; it gets what follows, from a log of recent frames or, where that does not reach back, as all chunks
//! with their versions; then each frame as it comes. It says which versions it has seen, and one that is far behind is
//! sent nothing until it has caught up.
//!
//! Nothing is applied twice or out of order, whoever sends it: each chunk of a [`Replica`] has its own version.

mod digest;
mod replica;
mod rows;

pub(crate) use digest::Digest;
pub(crate) use replica::{Replica, ReplicaChunks, Taken};

use crate::bandwidth::Reading;
use crate::limits;
use crate::role::{Body, Frame};
use crate::types::{Clock, ConnectionId, Time};
use crate::wire::Position;
use crate::wire::frame::{Form, Update};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// The sending end of a stream.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// The last version that is whole.
    version: Option<Clock>,
    /// The digest of its values, if it came with one.
    digest: Option<u64>,
    /// Recent versions that are whole, oldest first, without a gap.
    log: VecDeque<Version>,
    /// What was published of the next one.
    open: Version,
    /// Nothing was published since the last version was whole, also not elsewhere: the next frame is the first of its version.
    is_between: bool,
    receivers: BTreeMap<ConnectionId, Receiver>,
    /// Who asked for frames by codecs that are to hold in an epoch which has not begun here.
    early: BTreeMap<ConnectionId, Position>,
    /// The versions that left last, for what receivers' links carry.
    left: VecDeque<Left>,
}

/// What an image keeps of a stream: where it is. Receivers that have missed something get all chunks as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct StreamImage {
    version: Option<Clock>,
    digest: Option<u64>,
    is_between: bool,
}

/// A version that left.
#[derive(Debug, Clone, Copy, Default)]
struct Left {
    number: Clock,
    bytes: u64,
    /// When its first frame left.
    first: Time,
    /// When its last one did.
    last: Time,
}

impl Left {
    /// What a receiver's link carries, if it has the version now. While frames wait for the link all of the time counts; a
    /// link for which they do not wait carries more than comes.
    fn reading(&self, now: Time) -> Option<Reading> {
        let (all, rest) = (now.since(self.first), now.since(self.last));
        let has_waited = rest * 10 > all;
        Reading::transfer(self.bytes, if has_waited { all } else { rest })
    }
}

/// Frames of a version.
#[derive(Debug, Default)]
struct Version {
    number: Clock,
    frames: Vec<Logged>,
    bytes: usize,
    /// Its first frame is among them.
    has_first: bool,
}

/// A frame that may be sent again.
#[derive(Debug, Clone)]
struct Logged {
    update: Update,
    /// What a codec made, or single rows; whole chunks are sent as they are by then.
    payload: Option<Arc<[u8]>>,
}

/// Somebody who follows a stream.
#[derive(Debug)]
struct Receiver {
    /// The last version of which everything was sent.
    sent: Option<Clock>,
    /// What was sent, and it has not said to have: each version with its bytes. All chunks as they are count as one.
    unseen: VecDeque<(Clock, usize)>,
    /// Bytes of the version under way.
    open_bytes: usize,
    /// The version that it had when it came. It says nothing of versions up to that one, which a relay that is behind it sends.
    had: Option<Clock>,
    /// Everything that was published was sent to it.
    is_current: bool,
}

impl Receiver {
    /// One that has a version, of which there is so much here.
    fn new(had: Option<Clock>, version: Option<Clock>) -> Receiver {
        let sent = had.min(version);
        Receiver { sent, unseen: VecDeque::new(), open_bytes: 0, had, is_current: false }
    }

    /// Everything of a version was sent.
    fn note_sent(&mut self, version: Clock, bytes: usize) {
        self.sent = Some(version);
        if self.sent > self.had {
            self.unseen.push_back((version, bytes));
        }
        self.open_bytes = 0;
    }

    /// Whether it has everything that was published.
    fn has_all(&self) -> bool {
        self.is_current && self.unseen.is_empty()
    }

    /// It has this version.
    fn note_seen(&mut self, version: Clock) {
        self.unseen.retain(|(sent, _)| *sent > version);
    }

    /// Whether it has so little before it that it may be sent more. Two versions have always room, so that one that holds versions
    /// back until all streams have them ([`crate::worker`]) gets the next one of each.
    fn has_room(&self) -> bool {
        let (versions, bytes) =
            (self.unseen.len(), self.unseen.iter().map(|(_, bytes)| bytes).sum::<usize>());
        (versions as u64) < limits::MAX_VERSIONS_UNSEEN && (versions < 2 || bytes < limits::MAX_BYTES_UNSEEN)
    }
}

/// Who has the chunks of a stream as they are now.
pub(crate) trait Chunks {
    /// The [`valid_from`](crate::wire::Plan::valid_from) epoch of their codecs.
    fn epoch(&self) -> u32;

    /// How many there are.
    fn count(&self) -> usize;

    /// The version of a chunk by its place; `None` while it has no values.
    fn version(&self, index: usize) -> Option<Clock>;

    /// The values of a chunk by its place, in a frame that is a part of this version; `None` while there are none.
    fn frame(&self, index: usize, round: Clock) -> Option<Frame>;
}

impl Stream {
    pub(crate) fn image(&self) -> StreamImage {
        StreamImage { version: self.version, digest: self.digest, is_between: self.is_between }
    }

    /// The stream that an image was made of, without its receivers and without a log for them.
    pub(crate) fn from_image(image: StreamImage) -> Stream {
        let StreamImage { version, digest, is_between } = image;
        Stream { version, digest, is_between, ..Stream::default() }
    }

    /// Whether it has more than its image: frames to send again, receivers, measured links.
    pub(crate) fn exceeds_image(&self) -> bool {
        let Stream { log, open, receivers, early, left, .. } = self;
        let has_frames = !log.is_empty() || !open.frames.is_empty();
        has_frames || !receivers.is_empty() || !early.is_empty() || !left.is_empty()
    }

    /// A frame of the next version: everybody who is current gets it.
    pub(crate) fn publish(
        &mut self,
        now: Time,
        update: Update,
        body: &Body,
        payload_bytes: usize,
        send: &mut impl FnMut(ConnectionId, Frame),
    ) {
        if self.open.number != update.round || self.open.frames.is_empty() {
            let has_first = update.piece.sequence == 0 || self.is_between;
            self.open = Version { number: update.round, has_first, ..Version::default() };
            self.is_between = false;
        }
        self.note_left(now, &update, payload_bytes);
        let payload = match body {
            Body::Counted(bytes) if !matches!(update.form, Form::Dense(_)) => Some(bytes.clone()),
            _ => None,
        };
        self.open.bytes += payload.as_ref().map_or(0, |bytes| bytes.len()) + size_of::<Logged>();
        self.open.frames.push(Logged { update, payload });
        for (&to, receiver) in &mut self.receivers {
            if receiver.is_current {
                send(to, Frame { header: update.header(payload_bytes), body: body.clone() });
                receiver.open_bytes += payload_bytes;
                if update.piece.is_last {
                    receiver.note_sent(update.round, receiver.open_bytes);
                    receiver.is_current = receiver.has_room();
                }
            }
        }
        if update.piece.is_last {
            self.close(update.round);
            self.digest = Some(update.digest).filter(|digest| *digest != 0);
        }
    }

    /// A frame leaves.
    fn note_left(&mut self, now: Time, update: &Update, payload_bytes: usize) {
        if self.left.back().is_none_or(|left| left.number != update.round) {
            if self.left.len() as u64 == limits::MAX_VERSIONS_UNSEEN {
                self.left.pop_front();
            }
            self.left.push_back(Left { number: update.round, bytes: 0, first: now, last: now });
        }
        if let Some(left) = self.left.back_mut() {
            left.bytes += payload_bytes as u64;
            left.last = now;
        }
    }

    /// A frame of the next version came that is not passed on, since its chunk is newer here. If it was not published either, what
    /// is logged does not lead to that version.
    pub(crate) fn note_known(&mut self, update: &Update) {
        let is_it = |logged: &Logged| logged.update.piece.chunk == update.piece.chunk;
        if Some(update.round) > self.version && !self.open.frames.iter().any(is_it) {
            self.is_between = false;
            self.open.has_first = false;
        }
    }

    /// The version is whole.
    fn close(&mut self, number: Clock) {
        let follows = self.version.is_some_and(|version| version.checked_add(1) == Some(number));
        if !follows {
            // What came before does not lead to it.
            self.log.clear();
        }
        self.version = Some(number);
        self.is_between = true;
        let closed = std::mem::take(&mut self.open);
        if closed.has_first && closed.frames.iter().any(|logged| logged.payload.is_some()) {
            self.log.push_back(closed);
        } else {
            // A receiver that has missed it is sent the values as they are by then.
            self.log.clear();
        }
    }

    /// Forgets the oldest versions until the log has at most so many bytes.
    pub(crate) fn trim(&mut self, bytes: usize) {
        let is_long =
            |stream: &Stream| stream.log_bytes() > bytes || stream.log.len() > limits::MAX_VERSIONS_LOGGED;
        while is_long(self) && self.log.pop_front().is_some() {}
    }

    /// Bytes of frames that may be sent again.
    pub(crate) fn log_bytes(&self) -> usize {
        self.log.iter().map(|version| version.bytes).sum::<usize>() + self.open.bytes
    }

    /// Somebody follows the stream from now on, and is at this position.
    pub(crate) fn subscribe(
        &mut self,
        to: ConnectionId,
        position: Position,
        chunks: &impl Chunks,
        send: &mut impl FnMut(ConnectionId, Frame),
    ) {
        self.forget(to);
        match position.epoch.cmp(&chunks.epoch()) {
            // It will ask again when it knows of the codecs.
            Ordering::Less => {}
            Ordering::Greater => drop(self.early.insert(to, position)),
            Ordering::Equal => {
                // Who has more than there is here is sent it again, and knows it.
                self.receivers.insert(to, Receiver::new(position.version, self.version));
                self.catch_up(to, chunks, send);
            }
        }
    }

    /// Whether there is something that a receiver at this position does not have.
    pub(crate) fn is_beyond(&self, position: &Position) -> bool {
        self.version > position.version
    }

    /// Whether there are receivers, or will be when the epoch of their codecs begins.
    pub(crate) fn is_followed(&self) -> bool {
        !self.receivers.is_empty() || !self.early.is_empty()
    }

    /// Whether this one is among them.
    pub(crate) fn is_followed_by(&self, receiver: ConnectionId) -> bool {
        self.receivers.contains_key(&receiver) || self.early.contains_key(&receiver)
    }

    /// Everybody who is among them.
    pub(crate) fn followers(&self) -> impl Iterator<Item = ConnectionId> {
        self.receivers.keys().chain(self.early.keys()).copied()
    }

    /// Whether every receiver has all of it; nobody waits for readers.
    pub(crate) fn is_settled(&self) -> bool {
        let mut workers = self.receivers.iter().filter(|(to, _)| !to.is_reader());
        self.open.frames.is_empty() && workers.all(|(_, receiver)| receiver.has_all())
    }

    /// A version is whole that was not published here, since nobody followed.
    pub(crate) fn skip_to(&mut self, version: Option<Clock>) {
        self.version = version;
        self.digest = None;
        self.log.clear();
        self.open = Version::default();
        self.is_between = false;
    }

    /// A receiver has a version: what its link carries, if that is known from it.
    pub(crate) fn note_seen(
        &mut self,
        now: Time,
        to: ConnectionId,
        version: Clock,
        chunks: &impl Chunks,
        send: &mut impl FnMut(ConnectionId, Frame),
    ) -> Option<Reading> {
        let receiver = self.receivers.get_mut(&to)?;
        let is_new = receiver.unseen.iter().any(|(sent, _)| *sent == version);
        receiver.note_seen(version);
        if !receiver.is_current {
            self.catch_up(to, chunks, send);
            return None;
        }
        self.left.iter().find(|left| left.number == version && is_new)?.reading(now)
    }

    /// Sends a receiver everything that it lacks, if it has room.
    fn catch_up(
        &mut self,
        to: ConnectionId,
        chunks: &impl Chunks,
        send: &mut impl FnMut(ConnectionId, Frame),
    ) {
        let Some(receiver) = self.receivers.get_mut(&to).filter(|receiver| receiver.has_room()) else {
            return;
        };
        let mut bytes = 0;
        let mut send = |frame: Frame| {
            let payload_bytes = frame.header.payload_bytes as usize;
            send(to, frame);
            payload_bytes
        };
        let mut has_all_chunks = false;
        if let Some(version) = self.version.filter(|version| receiver.sent < Some(*version)) {
            let next = receiver.sent.and_then(|sent| sent.checked_add(1));
            match self.log.iter().position(|logged| Some(logged.number) == next) {
                Some(first) => {
                    for logged in self.log.range(first..) {
                        bytes = logged.frames.iter().map(|frame| frame.send(chunks, &mut send)).sum();
                        receiver.note_sent(logged.number, bytes);
                    }
                }
                None => {
                    let digest = self.digest.filter(|_| is_at(chunks, version)).unwrap_or(0);
                    let all = (0..chunks.count()).filter_map(|index| chunks.frame(index, version));
                    bytes = all.map(|frame| send(with_digest(frame, digest))).sum();
                    has_all_chunks = true;
                    receiver.note_sent(version, bytes);
                }
            }
            bytes = 0;
        }
        if !has_all_chunks {
            // Chunks of the next version that came while nobody followed are in no log.
            let logged = self.open.frames.first().map(|first| first.update.piece.sequence as usize);
            let round = self.version.map_or(0, |version| version.saturating_add(1));
            let is_newer = |index: &usize| chunks.version(*index) > self.version;
            let newer = (0..logged.unwrap_or(chunks.count())).filter(is_newer);
            bytes += newer.filter_map(|index| chunks.frame(index, round)).map(&mut send).sum::<usize>();
        }
        bytes += self.open.frames.iter().map(|logged| logged.send(chunks, &mut send)).sum::<usize>();
        receiver.open_bytes = bytes;
        receiver.is_current = true;
    }

    /// A receiver is gone.
    pub(crate) fn forget(&mut self, receiver: ConnectionId) {
        self.receivers.remove(&receiver);
        self.early.remove(&receiver);
    }

    /// Frames are made otherwise from now on. Receivers that know it have subscribed, and the others will.
    pub(crate) fn restart(&mut self, chunks: &impl Chunks, send: &mut impl FnMut(ConnectionId, Frame)) {
        self.receivers.clear();
        self.digest = None;
        self.log.clear();
        self.open = Version::default();
        self.is_between = false;
        for (to, position) in std::mem::take(&mut self.early) {
            self.subscribe(to, position, chunks, send);
        }
    }
}

impl Logged {
    /// Returns the bytes of what was sent.
    fn send(&self, chunks: &impl Chunks, send: &mut impl FnMut(Frame) -> usize) -> usize {
        let Logged { update, payload } = self;
        let frame = match payload {
            Some(payload) => {
                Some(Frame { header: update.header(payload.len()), body: Body::Counted(payload.clone()) })
            }
            None => chunks.frame(update.piece.sequence as usize, update.round),
        };
        frame.map_or(0, send)
    }
}

/// Whether all chunks are of this version.
fn is_at(chunks: &impl Chunks, version: Clock) -> bool {
    (0..chunks.count()).all(|index| chunks.version(index) == Some(version))
}

/// The last frame of a version tells the digest of its values; the others have none.
fn with_digest(frame: Frame, digest: u64) -> Frame {
    let Frame { header, body } = frame;
    let update = Update::decode(&header);
    let digest = if update.piece.is_last { digest } else { 0 };
    Frame { header: Update { digest, ..update }.header(header.payload_bytes as usize), body }
}

#[cfg(test)]
mod tests;
