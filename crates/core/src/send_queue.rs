//! Frames that wait to be sent on one connection, and which of them goes next.
//!
//! Frames leave in the order in which they were queued, but for those with a [`Priority`]: among these, tables that were created
//! earlier go first. Nothing overtakes a frame without a priority, a frame of its own table, one of an earlier clock, or one of
//! which bytes have left.
//!
//! A frame that the next of its kind makes out of date ([`Turn::Newest`]) is dropped when that one is queued, unless it is next: on a
//! connection that takes less than is said, what has to be heard does not wait behind old news.

use crate::role::{Frame, Priority, Turn};
use crate::types::{Clock, TableId};
use std::collections::{BTreeMap, VecDeque};

/// The frames, with a count of the memory that they hold.
#[derive(Debug, Default)]
pub struct SendQueue {
    /// Leave first, in this order.
    fixed: VecDeque<Frame>,
    /// Where the last frame is, among these, that the next of its kind makes out of date.
    newest: Option<usize>,
    /// Leave after these: by era, then by table. Frames without a priority have `None`; the first of several in a row begins an era.
    ranked: BTreeMap<(u64, Option<TableId>), VecDeque<Frame>>,
    /// The last era. Frames of an era do not overtake those of the one before.
    era: u64,
    /// The latest clock of a frame with a priority; a later one begins an era, so that no frame is overtaken without end.
    clock: Clock,
    len: usize,
    /// Memory that was taken for the frames.
    bytes: usize,
}

impl SendQueue {
    /// Queues a frame.
    pub fn push(&mut self, frame: Frame, turn: Turn) {
        if turn == Turn::Newest {
            self.drop_old_news();
            self.newest = self.ranked.is_empty().then_some(self.fixed.len());
        }
        self.len += 1;
        self.bytes += frame.memory_bytes();
        let Turn::Ranked(Priority { clock, table }) = turn else {
            match self.ranked.last_entry() {
                None => self.fixed.push_back(frame),
                Some(mut last) if last.key().1.is_none() => last.get_mut().push_back(frame),
                Some(_) => {
                    self.era += 1;
                    self.ranked.insert((self.era, None), [frame].into());
                }
            }
            return;
        };
        if clock > self.clock {
            self.clock = clock;
            self.era += 1;
        }
        self.ranked.entry((self.era, Some(table))).or_default().push_back(frame);
    }

    /// Drops the frame that is out of date. Bytes of the first one may have left.
    fn drop_old_news(&mut self) {
        if let Some(at) = self.newest.filter(|at| *at > 0)
            && let Some(old) = self.fixed.remove(at)
        {
            self.len -= 1;
            self.bytes -= old.memory_bytes();
        }
    }

    /// Takes the next frame out.
    pub fn pop(&mut self) -> Option<Frame> {
        let frame = match self.fixed.pop_front() {
            Some(frame) => {
                self.newest = self.newest.and_then(|at| at.checked_sub(1));
                frame
            }
            None => {
                let mut first = self.ranked.first_entry()?;
                let frame = first.get_mut().pop_front();
                if first.get().is_empty() {
                    first.remove();
                }
                frame?
            }
        };
        self.len -= 1;
        self.bytes -= frame.memory_bytes();
        Some(frame)
    }

    /// Takes the next frames out.
    pub fn remove(&mut self, count: usize) {
        (0..count).for_each(|_| _ = self.pop());
    }

    /// Some bytes of the next frame have left: nothing overtakes it any more.
    pub fn hold_first(&mut self) {
        if self.fixed.is_empty()
            && let Some(frame) = self.pop()
        {
            self.len += 1;
            self.bytes += frame.memory_bytes();
            self.fixed.push_back(frame);
        }
    }

    /// The next frame.
    pub fn first(&self) -> Option<&Frame> {
        self.iter().next()
    }

    /// The frames in the order in which they leave, as long as no other is queued.
    pub fn iter(&self) -> impl Iterator<Item = &Frame> {
        self.fixed.iter().chain(self.ranked.values().flatten())
    }

    /// The same, to bring them up to date.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Frame> {
        self.fixed.iter_mut().chain(self.ranked.values_mut().flatten())
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many frames wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Memory that was taken for the frames.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::Turn::{InOrder, Newest};
    use super::*;
    use crate::role::Body;
    use crate::wire::{Header, Kind};

    /// A frame with this number.
    fn frame(request: u64) -> Frame {
        Frame { header: Header { request, ..Header::new(Kind::Push) }, body: Body::Bytes(vec![0; 10]) }
    }

    fn of(clock: Clock, table: u32) -> Turn {
        Turn::Ranked(Priority { clock, table: TableId(table) })
    }

    fn queue(frames: &[Turn]) -> SendQueue {
        let mut queue = SendQueue::default();
        (0..).zip(frames).for_each(|(number, turn)| queue.push(frame(number), *turn));
        queue
    }

    fn drain(queue: &mut SendQueue) -> Vec<u64> {
        assert_eq!(queue.iter().count(), queue.len());
        let foreseen: Vec<u64> = queue.iter().map(|frame| frame.header.request).collect();
        let left: Vec<u64> = std::iter::from_fn(|| queue.pop()).map(|frame| frame.header.request).collect();
        assert_eq!((&foreseen, queue.len(), queue.bytes()), (&left, 0, 0));
        left
    }

    #[test]
    fn front_layers_overtake_and_a_table_keeps_its_order() {
        let mut waiting = queue(&[of(0, 2), of(0, 2), of(0, 1), of(0, 0), of(0, 1), of(0, 2)]);
        assert_eq!(drain(&mut waiting), [3, 2, 4, 0, 1, 5]);
    }

    #[test]
    fn nothing_overtakes_a_frame_without_a_priority() {
        let mut waiting =
            queue(&[InOrder, of(0, 2), InOrder, InOrder, of(0, 3), of(0, 1), InOrder, of(0, 0)]);
        assert_eq!(drain(&mut waiting), [0, 1, 2, 3, 5, 4, 6, 7]);
        let mut plain = queue(&[InOrder; 4]);
        assert_eq!(drain(&mut plain), [0, 1, 2, 3]);
    }

    #[test]
    fn old_news_makes_way_for_new_unless_it_is_next() {
        let mut waiting = queue(&[Newest, InOrder, Newest, InOrder, Newest]);
        // Bytes of the first may have left.
        assert_eq!(drain(&mut waiting), [0, 1, 3, 4]);
        let mut waiting = queue(&[InOrder, Newest, InOrder]);
        waiting.remove(1);
        waiting.push(frame(3), Newest);
        assert_eq!(drain(&mut waiting), [1, 2, 3]);
        // Behind frames with a priority it stays: they are not in one row.
        let mut waiting = queue(&[Newest, of(0, 1), Newest, Newest]);
        assert_eq!(drain(&mut waiting), [0, 1, 2, 3]);
    }

    #[test]
    fn an_earlier_clock_is_not_overtaken() {
        let mut waiting = queue(&[of(4, 9), of(5, 1), of(5, 0), of(6, 0)]);
        assert_eq!(drain(&mut waiting), [0, 2, 1, 3]);
        // What is sent again keeps behind frames of its table, whatever its clock.
        let mut again = queue(&[of(5, 1), of(4, 1), of(4, 0)]);
        assert_eq!(drain(&mut again), [2, 0, 1]);
    }

    #[test]
    fn a_frame_that_has_begun_to_leave_stays_first() {
        let mut waiting = queue(&[of(0, 2), of(0, 2)]);
        waiting.hold_first();
        waiting.push(frame(2), of(0, 0));
        waiting.hold_first();
        assert_eq!(waiting.first().map(|frame| frame.header.request), Some(0));
        assert_eq!(drain(&mut waiting), [0, 2, 1]);
    }

    #[test]
    fn frames_are_counted_with_their_memory() {
        let mut waiting = queue(&[InOrder, of(0, 1), of(0, 0)]);
        assert_eq!((waiting.len(), waiting.bytes()), (3, 3 * frame(0).memory_bytes()));
        waiting.remove(2);
        assert_eq!((waiting.len(), waiting.bytes()), (1, frame(0).memory_bytes()));
        assert_eq!(drain(&mut waiting), [1]);
    }
}
