//! One direction of a link that flows share fairly.

use paramill_core::types::Time;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// A link that serves one frame at a time, by start-time fair queueing.
///
/// Every frame has a tag: where its flow would be, counted in bytes, had it always had its share. The frame with the
/// least tag is served next. A flow that was idle begins where the link is, so that it neither saves up credit nor
/// waits behind the backlog of others.
#[derive(Debug)]
pub(super) struct FairLink {
    /// Gigabits per second, which are bits per nanosecond, from a time on. The first one is from the beginning.
    rates: Vec<(Time, f64)>,
    /// When the frame that is served will have left.
    free_at: Time,
    /// The tag of the frame that is served, or was served last.
    reached: u64,
    /// The highest tag at which a frame that was served ended.
    served: u64,
    /// Frames that wait, by tag and order of arrival.
    waiting: BinaryHeap<Reverse<(u64, u64, u32)>>,
    arrived: u64,
    bytes: u64,
    busy: Duration,
}

impl FairLink {
    /// A link of this rate in gigabits per second; 0 means unlimited.
    pub(super) fn new(gbit_per_s: f64) -> FairLink {
        FairLink {
            rates: vec![(Time::ZERO, gbit_per_s)],
            free_at: Time::ZERO,
            reached: 0,
            served: 0,
            waiting: BinaryHeap::new(),
            arrived: 0,
            bytes: 0,
            busy: Duration::ZERO,
        }
    }

    /// The rate is another one from `at` on. A frame that has begun before this was said keeps what it was promised.
    pub(super) fn set_rate(&mut self, at: Time, gbit_per_s: f64) {
        let behind = self.rates.partition_point(|(from, _)| *from <= at);
        self.rates.insert(behind, (at, gbit_per_s));
    }

    /// Bytes that were served, and the time that they took.
    pub(super) fn usage(&self) -> (u64, Duration) {
        (self.bytes, self.busy)
    }

    /// The tag of a frame that comes now, whose flow's last frame ended at the tag `last`.
    pub(super) fn tag(&mut self, now: Time, last: u64) -> u64 {
        if self.is_free(now) {
            self.reached = self.reached.max(self.served);
        }
        last.max(self.reached)
    }

    /// Whether a frame that comes now is served at once.
    pub(super) fn is_free(&self, now: Time) -> bool {
        self.waiting.is_empty() && self.free_at <= now
    }

    /// A frame waits. Says when the link has to be looked at, if nobody knows it yet.
    pub(super) fn wait(&mut self, tag: u64, frame: u32) -> Option<Time> {
        self.waiting.push(Reverse((tag, self.arrived, frame)));
        self.arrived += 1;
        (self.waiting.len() == 1).then_some(self.free_at)
    }

    /// The frame that is served next, with its tag.
    pub(super) fn next(&mut self) -> Option<(u64, u32)> {
        self.waiting.pop().map(|Reverse((tag, _, frame))| (tag, frame))
    }

    /// When the link has to be looked at again.
    pub(super) fn next_time(&self) -> Option<Time> {
        (!self.waiting.is_empty()).then_some(self.free_at)
    }

    /// Serves a frame from `start` on; says when it has left.
    pub(super) fn serve(&mut self, start: Time, tag: u64, bytes: u64) -> Time {
        let end = self.end(start, bytes);
        self.free_at = end;
        self.reached = tag;
        self.served = self.served.max(tag + bytes);
        self.bytes += bytes;
        self.busy += end.since(start);
        end
    }

    /// When so many bytes have left that begin at `start`, over all changes of the rate meanwhile.
    fn end(&self, start: Time, bytes: u64) -> Time {
        let mut bits = bytes as f64 * 8.0;
        let mut at = start;
        let mut rate = self.rates.partition_point(|(from, _)| *from <= start) - 1;
        loop {
            let (_, gbit_per_s) = self.rates[rate];
            if gbit_per_s == 0.0 {
                return at;
            }
            let end = Time(at.0.saturating_add((bits / gbit_per_s) as u64));
            match self.rates.get(rate + 1) {
                Some(&(changes, _)) if changes < end => {
                    bits -= gbit_per_s * changes.since(at).as_nanos() as f64;
                    (at, rate) = (changes, rate + 1);
                }
                _ => return end,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_frame_follows_every_change_of_the_rate() {
        // A byte takes a nanosecond at 8 Gbit/s.
        let mut link = FairLink::new(8.0);
        assert_eq!(link.serve(Time(0), 0, 1000), Time(1000));
        link.set_rate(Time(5000), 4.0);
        link.set_rate(Time(6000), 16.0);
        assert_eq!(link.serve(Time(4800), 1000, 200), Time(5000));
        // 300 at the first rate, 500 at half of it, 400 at twice.
        assert_eq!(link.serve(Time(4700), 1200, 1200), Time(6200));
        assert_eq!(link.usage(), (2400, Duration::from_nanos(1000 + 200 + 1500)));
    }

    #[test]
    fn a_flow_that_was_idle_saves_up_nothing_and_waits_for_no_backlog() {
        let mut link = FairLink::new(8.0);
        // One flow has four frames of 100 bytes there; another one comes when the second of them is served.
        let first = link.tag(Time(0), 0);
        link.serve(Time(0), first, 100);
        assert_eq!(link.wait(100, 1), Some(Time(100)));
        assert_eq!([link.wait(200, 2), link.wait(300, 3)], [None, None]);
        let (tag, frame) = link.next().unwrap();
        assert_eq!((tag, frame), (100, 1));
        link.serve(Time(100), tag, 100);
        let other = link.tag(Time(150), 0);
        assert_eq!(other, 100);
        link.wait(other, 9);
        assert_eq!(link.next().map(|(_, frame)| frame), Some(9));
    }
}
