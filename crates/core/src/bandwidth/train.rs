//! A train of probes, and what its delays mean.

use super::Probe;
use crate::types::Time;
use std::time::Duration;

/// Frames of a train.
pub(super) const FRAMES: usize = 40;
/// A train lasts about so many seconds, where its frames are neither too short nor too long for that: longer than what the buffers on its way take
/// in at once.
const LASTS: f64 = 0.1;
const SHORTEST_FRAME: f64 = 1024.0;
const LONGEST_FRAME: f64 = (64 << 10) as f64;
/// Bytes of a frame beside its padding.
const OVERHEAD: f64 = 64.0 + 24.0;
/// Delays are compared by the least of so many frames in a row: a queue delays all of them, a busy machine some.
const GROUP: usize = 8;
/// The least part of the train's length by which its end is later than its beginning, for the link to be too slow.
const LEAST_RISE: f64 = 0.1;
/// The least part of all ups and downs that this is.
const LEAST_TREND: f64 = 0.5;

/// The bytes of each frame of a train at a rate.
fn frame_bytes(rate: f64) -> f64 {
    (rate * LASTS / FRAMES as f64).clamp(SHORTEST_FRAME, LONGEST_FRAME)
}

/// The bytes of a train at a rate.
pub(super) fn bytes(rate: f64) -> f64 {
    FRAMES as f64 * frame_bytes(rate)
}

/// A train that is being sent.
#[derive(Debug)]
pub(super) struct Train {
    number: u64,
    rate: f64,
    next: usize,
    due: Time,
}

impl Train {
    /// A train that leaves now.
    pub(super) fn new(now: Time, number: u64, rate: f64) -> Train {
        Train { number, rate, next: 0, due: now }
    }

    /// When its next frame leaves; `None` once all of them have left.
    pub(super) fn due(&self) -> Option<Time> {
        (self.next < FRAMES).then_some(self.due)
    }

    /// Its next frame, if it is time.
    pub(super) fn poll(&mut self, now: Time) -> Option<Probe> {
        self.due().filter(|due| *due <= now)?;
        let bytes = frame_bytes(self.rate);
        let probe = Probe {
            train: self.number,
            index: self.next as u32,
            sent: now.0 / 1000,
            rate: self.rate as u64,
            padding: vec![0; (bytes - OVERHEAD) as usize],
        };
        self.next += 1;
        self.due = self.due + Duration::from_secs_f64(bytes / self.rate);
        Some(probe)
    }
}

/// Whether frames that were sent at this rate, and were so late in microseconds, are each later than those before.
pub(super) fn is_rising(delays: &[i64], rate: f64) -> bool {
    let least: Vec<i64> = delays.chunks(GROUP).filter_map(|group| group.iter().copied().min()).collect();
    let (Some(first), Some(last)) = (least.first(), least.last()) else { return false };
    let steps = || least.windows(2).map(|pair| pair[1].saturating_sub(pair[0]));
    let rise = last.saturating_sub(*first) as f64;
    let ups = steps().filter(|step| *step > 0).count();
    let moved: f64 = steps().map(|step| step.unsigned_abs() as f64).sum();
    let length = bytes(rate) / rate.max(1.0) * 1e6;
    rise >= LEAST_RISE * length && rise >= LEAST_TREND * moved && 4 * ups >= 3 * (least.len() - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: f64 = 6_250_000.0;

    #[test]
    fn a_train_is_sent_at_its_rate() {
        for rate in [12_500.0, RATE, 1e9] {
            let (mut train, mut now, mut bytes) = (Train::new(Time::ZERO, 1, rate), Time::ZERO, 0.0);
            while let Some(due) = train.due() {
                now = due;
                let probe = train.poll(now).expect("it is due");
                bytes += probe.padding.len() as f64 + OVERHEAD;
                assert_eq!(train.poll(Time(now.0.saturating_sub(1))), None);
            }
            let seconds = now.as_secs_f64() * FRAMES as f64 / (FRAMES - 1) as f64;
            assert!((bytes / seconds / rate - 1.0).abs() < 0.01, "{rate}: {bytes} bytes in {seconds} s");
            assert!(bytes <= FRAMES as f64 * LONGEST_FRAME);
        }
    }

    #[test]
    fn delays_that_rise_are_told_from_those_that_do_not() {
        // A train of 100 ms on a link that carries half of it is 100 ms late at its end.
        let late = |index: i64| 300 + index * 2500;
        let slow: Vec<i64> = (0..FRAMES as i64).map(late).collect();
        assert!(is_rising(&slow, RATE));
        let noise = [0, 900, 100, 3000, 50, 700, 0, 2500, 10, 400];
        let noisy = |slope: i64| -> Vec<i64> {
            (0..FRAMES).map(|index| index as i64 * slope + noise[index % noise.len()]).collect()
        };
        assert!(!is_rising(&noisy(0), RATE) && is_rising(&noisy(700), RATE));
        assert!(!is_rising(&[0; FRAMES], RATE) && !is_rising(&[], RATE));
        // One pause in the middle, after which all is as it was.
        let mut pause = vec![0; FRAMES];
        pause[8..14].fill(50_000);
        assert!(!is_rising(&pause, RATE));
    }
}
