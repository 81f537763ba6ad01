//! Whether links carry what a codec needs (`dvf:low=...,up=...`): Parameter Flow's thresholds that follow the network.
//!
//! Who sends wants to know it of each of its links. Transfers tell: a push by the times at which its frames arrive (`Gauge`),
//! a version that is broadcast by the time until its receiver has it (`stream.rs`). A link that carries too little to tell is
//! probed: a `Train` of frames is sent at the rate that is needed, and if each of them is later than the one before, the
//! link carries less (self-loading periodic streams, as in Pathload). The sender's `Watch` has the readings, and decides.

mod gauge;
mod train;
mod watch;

pub(crate) use gauge::Gauge;
use train::Train;
pub(crate) use watch::Watch;

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// Transfers of fewer bytes say nothing: a link's buffers take them at any rate.
pub(crate) const LEAST_BYTES: u64 = 32 << 10;

/// What is known of a link by one transfer or one train of probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reading {
    /// So many bytes took so long.
    Transfer {
        /// The bytes.
        bytes: u64,
        /// The time, in microseconds.
        micros: u64,
    },
    /// Frames of a train at a rate were each as late as the others, or each later than the one before.
    Probe {
        /// The rate, in bytes per second.
        rate: u64,
        /// They were each later.
        is_delayed: bool,
        /// So much else arrived meanwhile that the receiver got that rate all the same.
        is_disturbed: bool,
    },
}

impl Reading {
    pub(crate) fn transfer(bytes: u64, took: Duration) -> Option<Reading> {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
        (bytes >= LEAST_BYTES).then_some(Reading::Transfer { bytes, micros })
    }

    /// The bytes per second that the link carries at least, or at most if it is a train that was delayed.
    pub(crate) fn rate(&self) -> f64 {
        match *self {
            Reading::Transfer { bytes, micros } => bytes as f64 * 1e6 / micros.max(1) as f64,
            Reading::Probe { rate, .. } => rate as f64,
        }
    }
}

/// `24 Mbit/s`, `less than 50 Mbit/s` or `50 Mbit/s or more`.
impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mbit = Mbit(self.rate());
        match self {
            Reading::Transfer { .. } => write!(f, "{mbit}"),
            Reading::Probe { is_delayed: true, .. } => write!(f, "less than {mbit}"),
            Reading::Probe { is_delayed: false, .. } => write!(f, "{mbit} or more"),
        }
    }
}

/// Why a codec whose threshold follows links is not for workers behind an aggregator, which sums what they push by a codec of its own.
pub(crate) fn not_behind_aggregators(codec: &impl fmt::Display) -> String {
    format!(
        "`{codec}` follows the links to the servers, and workers behind an aggregator have none; give it `delta` in place of \
         `low` and `up`, or let workers go to the servers themselves"
    )
}

/// Bytes per second, for people.
pub(crate) struct Mbit(pub(crate) f64);

impl fmt::Display for Mbit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mbit = self.0 * 8.0 / 1e6;
        let digits = if mbit < 10.0 { 1 } else { 0 };
        write!(f, "{mbit:.digits$} Mbit/s")
    }
}

/// A frame of a train of probes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The train's number, as its sender counts.
    pub train: u64,
    /// The frame's number in it, from 0.
    pub index: u32,
    /// When it was sent, by the sender's clock, in microseconds.
    pub sent: u64,
    /// The rate at which the train is sent, in bytes per second.
    pub rate: u64,
    /// Bytes that make it as long as it is to be.
    pub padding: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_are_told_in_words() {
        let transfer = Reading::transfer(3_000_000, Duration::from_secs(1)).unwrap();
        assert_eq!(transfer.to_string(), "24 Mbit/s");
        assert_eq!(
            Reading::Probe { rate: 6_250_000, is_delayed: true, is_disturbed: false }.to_string(),
            "less than 50 Mbit/s"
        );
        assert_eq!(
            Reading::Probe { rate: 12_500, is_delayed: false, is_disturbed: false }.to_string(),
            "0.1 Mbit/s or more"
        );
        assert_eq!(Reading::transfer(LEAST_BYTES - 1, Duration::from_secs(1)), None);
    }
}
