//! A star: every host hangs on one switch by a link of its own, with a rate for each direction.
//!
//! A frame occupies its sender's link, then, a latency later, its receiver's link; each link serves frames in the
//! order they come. A long frame is received while it is still being sent. Hosts that are the same host exchange
//! frames without touching a link.

use paramill_core::limits;
use paramill_core::prng::Prng;
use paramill_core::types::Time;
use paramill_core::wire::{HEADER_BYTES, padded};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Rates and delays.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkConfig {
    /// Time from one host to another, in microseconds.
    pub latency_us: f64,
    /// Added to it: exponential with this mean, in microseconds.
    pub jitter_us: f64,
    /// Rate of each host's link, in each direction, in gigabits per second; 0 means unlimited.
    pub gbit_per_s: f64,
    /// Payload bytes count this many times on links, so that a small table stands for a large model.
    pub wire_scale: f64,
    /// Time that a data core takes for a frame, in microseconds.
    pub handling_us: f64,
    /// Bytes that a connection holds in each direction; what does not fit waits at its sender.
    pub window_bytes: u64,
    /// Frames that may wait for a peer before its owner stops reading from it.
    pub waiting_frames: u64,
}

impl Default for NetworkConfig {
    fn default() -> NetworkConfig {
        NetworkConfig {
            latency_us: 50.0,
            jitter_us: 5.0,
            gbit_per_s: 10.0,
            wire_scale: 1.0,
            handling_us: 1.0,
            window_bytes: 4 << 20,
            waiting_frames: limits::MAX_WAITING_FRAMES as u64,
        }
    }
}

impl NetworkConfig {
    /// Whether the numbers can be used; the error says why not.
    pub fn check(&self) -> Result<(), String> {
        for (name, value, limit) in [
            ("latency_us", self.latency_us, 1e9),
            ("jitter_us", self.jitter_us, 1e9),
            ("gbit_per_s", self.gbit_per_s, 1e6),
            ("wire_scale", self.wire_scale, 1e9),
            ("handling_us", self.handling_us, 1e9),
        ] {
            if !(0.0..=limit).contains(&value) {
                return Err(format!("network.{name} = {value}: expected a number from 0 to {limit:e}"));
            }
        }
        if self.waiting_frames == 0 {
            return Err("network.waiting_frames = 0: expected at least 1".into());
        }
        Ok(())
    }
}

/// A host's number: nodes on the same host share its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostId(pub u32);

/// What went over a host's link.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct LinkUse {
    /// Bytes sent, scaled.
    pub bytes_out: u64,
    /// Bytes received, scaled.
    pub bytes_in: u64,
    /// Time that sending took.
    pub busy_out: Duration,
    /// Time that receiving took.
    pub busy_in: Duration,
}

/// The links.
#[derive(Debug)]
pub struct Network {
    config: NetworkConfig,
    links: Vec<Link>,
}

#[derive(Debug, Clone, Default)]
struct Link {
    out_free: Time,
    in_free: Time,
    usage: LinkUse,
}

/// When a frame is on its way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Passage {
    /// When its first byte reaches the receiver's link.
    pub(crate) head: Time,
    /// When its last byte does, if nothing else is in the way.
    pub(crate) tail: Time,
}

impl Network {
    /// A network without hosts; they come with the first frame they send or receive.
    pub fn new(config: NetworkConfig) -> Network {
        Network { config, links: Vec::new() }
    }

    /// The rates and delays.
    pub fn config(&self) -> &NetworkConfig {
        &self.config
    }

    /// What went over a host's link so far.
    pub fn usage(&self, host: HostId) -> LinkUse {
        self.links.get(host.0 as usize).map(|link| link.usage).unwrap_or_default()
    }

    /// Time for a message without a size, such as the opening of a connection. Who sends it brings the dice.
    pub(crate) fn latency(&self, from: HostId, to: HostId, dice: &mut Prng) -> Duration {
        if from == to {
            return Duration::from_micros(1);
        }
        let jitter = match self.config.jitter_us {
            0.0 => 0.0,
            mean => dice.exponential(mean),
        };
        Duration::from_nanos(((self.config.latency_us + jitter) * 1e3) as u64)
    }

    /// Sends a frame from `from` at `now`.
    pub(crate) fn send(
        &mut self,
        now: Time,
        from: HostId,
        to: HostId,
        payload_bytes: usize,
        dice: &mut Prng,
    ) -> Passage {
        let latency = self.latency(from, to, dice);
        if from == to {
            return Passage { head: now + latency, tail: now + latency };
        }
        let (bytes, time) = self.size(payload_bytes);
        let link = self.link(from);
        let start = link.out_free.max(now);
        link.out_free = start + time;
        link.usage.bytes_out += bytes;
        link.usage.busy_out += time;
        Passage { head: start + latency, tail: start + time + latency }
    }

    /// Receives a frame whose first byte is at `to`'s link at `now`; says when its last byte is through.
    pub(crate) fn receive(
        &mut self,
        now: Time,
        from: HostId,
        to: HostId,
        tail: Time,
        payload_bytes: usize,
    ) -> Time {
        if from == to {
            return now;
        }
        let (bytes, time) = self.size(payload_bytes);
        let link = self.link(to);
        let start = link.in_free.max(now);
        link.in_free = start + time;
        link.usage.bytes_in += bytes;
        link.usage.busy_in += time;
        link.in_free.max(tail)
    }

    fn size(&self, payload_bytes: usize) -> (u64, Duration) {
        let bytes = HEADER_BYTES as f64 + padded(payload_bytes) as f64 * self.config.wire_scale;
        let seconds =
            if self.config.gbit_per_s == 0.0 { 0.0 } else { bytes * 8.0 / (self.config.gbit_per_s * 1e9) };
        (bytes as u64, Duration::from_nanos((seconds * 1e9) as u64))
    }

    fn link(&mut self, host: HostId) -> &mut Link {
        let index = host.0 as usize;
        if self.links.len() <= index {
            self.links.resize(index + 1, Link::default());
        }
        &mut self.links[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: HostId = HostId(0);
    const B: HostId = HostId(1);
    const C: HostId = HostId(2);

    /// 8 Gbit/s: a byte takes a nanosecond.
    fn network() -> Network {
        let config =
            NetworkConfig { latency_us: 10.0, jitter_us: 0.0, gbit_per_s: 8.0, ..Default::default() };
        Network::new(config)
    }

    #[test]
    fn frames_queue_on_the_senders_link() {
        let mut network = network();
        let first = network.send(Time(0), A, B, 936, &mut Prng::new(1));
        let second = network.send(Time(0), A, C, 936, &mut Prng::new(1));
        assert_eq!((first.head, first.tail), (Time(10_000), Time(11_024)));
        assert_eq!((second.head, second.tail), (Time(11_024), Time(12_048)));
        assert_eq!(network.usage(A).bytes_out, 2048);
    }

    #[test]
    fn frames_queue_on_the_receivers_link_and_are_received_while_sent() {
        let mut network = network();
        let one = network.send(Time(0), A, C, 936, &mut Prng::new(1));
        let two = network.send(Time(0), B, C, 936, &mut Prng::new(1));
        let one_done = network.receive(one.head, A, C, one.tail, 936);
        let two_done = network.receive(two.head, B, C, two.tail, 936);
        assert_eq!((one_done, two_done), (Time(11_024), Time(12_048)));
        assert_eq!(network.usage(C).busy_in, Duration::from_nanos(2048));
    }

    #[test]
    fn a_host_reaches_itself_without_a_link() {
        let mut network = network();
        let passage = network.send(Time(5), A, A, 1 << 20, &mut Prng::new(1));
        assert_eq!(passage.tail, Time(1005));
        assert_eq!(network.usage(A).bytes_out, 0);
    }

    #[test]
    fn bad_numbers_are_named() {
        let config = NetworkConfig { latency_us: f64::NAN, ..Default::default() };
        assert!(config.check().unwrap_err().contains("network.latency_us"));
    }
}
