//! Traffic of others over the same links.

use super::HostId;
use super::tiers::Flow;
use paramill_core::types::Time;
use std::time::Duration;

/// Bytes of a frame of a greedy flow.
const FRAME_BYTES: u64 = 64 << 10;
/// A flow with a rate sends as much in a frame as it may send in this time, within what a frame may have.
const FRAME_TIME: Duration = Duration::from_millis(1);
/// Bytes of the shortest frame: a packet.
const PACKET_BYTES: u64 = 1500;
/// Frames of a flow that may be under way.
const WINDOW_FRAMES: u32 = 8;

/// Traffic of others: it takes part in the sharing of links, and nobody reads it.
#[derive(Debug, Clone, PartialEq)]
pub struct BackgroundFlow {
    /// The host that sends.
    pub from: HostId,
    /// The host that receives.
    pub to: HostId,
    /// What it sends at most; `None`: as much as it can.
    pub gbit_per_s: Option<f64>,
    /// When it begins.
    pub starts: Time,
    /// When it ends.
    pub until: Time,
}

/// What sends a [`BackgroundFlow`].
#[derive(Debug)]
pub(super) struct Source {
    pub(super) flow: Flow,
    pub(super) frame_bytes: u64,
    /// From one frame to the next, for a flow with a rate.
    interval: Option<Duration>,
    until: Time,
    under_way: u32,
}

impl Source {
    pub(super) fn new(background: &BackgroundFlow, flow: Flow) -> Source {
        let frame_bytes = background.gbit_per_s.map_or(FRAME_BYTES, |rate| {
            ((rate * FRAME_TIME.as_nanos() as f64 / 8.0) as u64).clamp(PACKET_BYTES, FRAME_BYTES)
        });
        let interval = |rate: f64| Duration::from_nanos((frame_bytes as f64 * 8.0 / rate) as u64);
        Source {
            flow,
            frame_bytes,
            interval: background.gbit_per_s.map(interval),
            until: background.until,
            under_way: 0,
        }
    }

    /// How many frames it sends when it begins.
    pub(super) fn first_frames(&self) -> u32 {
        if self.interval.is_some() { 1 } else { WINDOW_FRAMES }
    }

    /// Whether it sends a frame now, which is then under way. What a flow with a rate cannot send since too much is under way
    /// is left out.
    pub(super) fn sends(&mut self, now: Time) -> bool {
        let may = now < self.until && self.under_way < WINDOW_FRAMES;
        self.under_way += u32::from(may);
        may
    }

    /// When a flow with a rate has its next frame.
    pub(super) fn next_emission(&self, now: Time) -> Option<Time> {
        self.interval.map(|interval| now + interval).filter(|at| *at < self.until)
    }

    /// A frame has arrived. Says whether another one follows at once.
    pub(super) fn landed(&mut self) -> bool {
        self.under_way -= 1;
        self.interval.is_none()
    }
}
