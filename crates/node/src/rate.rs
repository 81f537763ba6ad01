//! How fast a node may send: a leaky bucket that all of its data connections share.

use paramill_core::types::Time;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

/// How long a node may send at full speed before its rate holds: long enough that a loop has something to write when it wakes.
const BURST_NS: u64 = 4_000_000;
/// What a node of any rate may send at once.
const LEAST_BURST_BYTES: f64 = 16e3;
/// A sender that has to wait does so until the bucket takes this part of a burst: fewer, larger writes.
const GRAINS: u64 = 4;

const BITS_PER_BYTE: f64 = 8.0;
const LEAST_BITS: f64 = 1e3;
const MOST_BITS: f64 = 1e13;

/// Bits per second; its text form is `800Mbit`, with the prefixes k, M and G.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rate {
    bits_per_s: f64,
}

impl Rate {
    /// The same in bytes per second.
    pub fn bytes_per_s(self) -> f64 {
        self.bits_per_s / BITS_PER_BYTE
    }
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Rate, String> {
        let expected = || format!("`{text}`: expected 1kbit to 10000Gbit, such as 800Mbit or 1.5Gbit");
        let number = text.trim().strip_suffix("bit").ok_or_else(expected)?;
        let prefixes = [('k', 1e3), ('K', 1e3), ('M', 1e6), ('G', 1e9)];
        let scaled =
            prefixes.iter().find_map(|(prefix, scale)| Some((number.strip_suffix(*prefix)?, *scale)));
        let (digits, scale) = scaled.unwrap_or((number, 1.0));
        let bits_per_s = digits.trim().parse::<f64>().map_err(|_| expected())? * scale;
        match (LEAST_BITS..=MOST_BITS).contains(&bits_per_s) {
            true => Ok(Rate { bits_per_s }),
            false => Err(expected()),
        }
    }
}

impl TryFrom<String> for Rate {
    type Error = String;

    fn try_from(text: String) -> Result<Rate, String> {
        text.parse()
    }
}

impl From<Rate> for String {
    fn from(rate: Rate) -> String {
        rate.to_string()
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scales = [(1e9, "G"), (1e6, "M"), (1e3, "k")];
        let (scale, prefix) =
            scales.into_iter().find(|(scale, _)| self.bits_per_s >= *scale).unwrap_or((1.0, ""));
        write!(f, "{}{prefix}bit", self.bits_per_s / scale)
    }
}

/// The bucket. Bytes that are sent fill it, and it leaks at the node's rate; what would overflow waits at the sender.
///
/// Loops of a process share it without a lock: its state is the moment at which it will be empty.
#[derive(Debug)]
pub(crate) struct Bucket {
    empty_at: AtomicU64,
    ns_per_byte: f64,
    burst_ns: u64,
}

impl Bucket {
    pub(crate) fn new(rate: Rate) -> Bucket {
        let ns_per_byte = 1e9 / rate.bytes_per_s();
        let burst_ns = BURST_NS.max((LEAST_BURST_BYTES * ns_per_byte) as u64);
        Bucket { empty_at: AtomicU64::new(0), ns_per_byte, burst_ns }
    }

    /// How many of these bytes may be sent now; the error says when to ask again.
    pub(crate) fn take(&self, now: Time, wanted: usize) -> Result<usize, Time> {
        let grain_ns = self.burst_ns / GRAINS;
        loop {
            let known = self.empty_at.load(Ordering::Relaxed);
            let empty_at = known.max(now.0);
            let room_ns = self.burst_ns.saturating_sub(empty_at - now.0);
            if room_ns < grain_ns {
                return Err(Time(empty_at + grain_ns - self.burst_ns));
            }
            let bytes = wanted.min(((room_ns as f64 / self.ns_per_byte) as usize).max(1));
            if self.swap(known, empty_at + self.time_of(bytes)) {
                return Ok(bytes);
            }
        }
    }

    /// Bytes that were taken and could not be sent.
    pub(crate) fn put_back(&self, bytes: usize) {
        self.empty_at.fetch_sub(self.time_of(bytes), Ordering::Relaxed);
    }

    fn time_of(&self, bytes: usize) -> u64 {
        (bytes as f64 * self.ns_per_byte) as u64
    }

    fn swap(&self, known: u64, next: u64) -> bool {
        self.empty_at.compare_exchange_weak(known, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// 1000 bytes per millisecond.
    fn bucket() -> Bucket {
        Bucket::new("8Mbit".parse().unwrap())
    }

    #[test]
    fn rates_are_read_as_they_are_written() {
        for text in ["800Mbit", "1.5Gbit", "64kbit", "1Gbit"] {
            assert_eq!(text.parse::<Rate>().unwrap().to_string(), text);
        }
        assert_eq!("800Mbit".parse::<Rate>().unwrap().bytes_per_s(), 100e6);
        for text in ["800", "0Mbit", "-1Mbit", "fastbit", "100MB", "1e9Gbit", "NaNbit", ""] {
            let error = text.parse::<Rate>().unwrap_err();
            assert!(error.contains("expected 1kbit to"), "{text}: {error}");
        }
    }

    #[test]
    fn a_burst_leaves_at_once_and_the_rest_at_the_rate() {
        let (bucket, begin) = (bucket(), Time(100 * MS));
        // 16,000 bytes are the least burst.
        assert_eq!(bucket.take(begin, 40_000), Ok(16_000));
        let Err(later) = bucket.take(begin, 1) else { panic!("the bucket is full") };
        assert_eq!(later, Time(104 * MS), "a quarter of it has leaked by then");
        assert_eq!(bucket.take(later, 40_000), Ok(4000));
        assert_eq!(bucket.take(Time(104 * MS + MS / 2), 100), Err(Time(108 * MS)));
    }

    #[test]
    fn over_a_long_time_the_rate_is_kept_whatever_is_asked_for() {
        let (bucket, mut now, mut sent) = (bucket(), Time(5 * MS), 0);
        let end = Time(5 * MS + 1000 * MS);
        while now < end {
            match bucket.take(now, 1 + sent % 3000) {
                Ok(bytes) => sent += bytes,
                Err(later) => {
                    assert!(later > now, "a wait is never empty");
                    now = later;
                }
            }
        }
        assert!((1_000_000..1_021_000).contains(&sent), "{sent} bytes in a second at 1,000,000 per second");
    }

    #[test]
    fn an_idle_node_saves_no_more_than_a_burst() {
        let bucket = bucket();
        assert_eq!(bucket.take(Time(MS), 1000), Ok(1000));
        assert_eq!(bucket.take(Time(10_000 * MS), 1 << 30), Ok(16_000));
    }

    #[test]
    fn what_a_socket_did_not_take_is_put_back() {
        let (bucket, now) = (bucket(), Time(50 * MS));
        assert_eq!(bucket.take(now, 16_000), Ok(16_000));
        bucket.put_back(10_000);
        assert_eq!(bucket.take(now, 16_000), Ok(10_000));
    }
}
