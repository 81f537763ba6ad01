//! A star: every host hangs on one switch by a link of its own, with a rate for each direction.
//!
//! A frame occupies its sender's link, then, a latency later, its receiver's link; each link serves frames in the
//! order they come. A long frame is received while it is still being sent.

use super::{Direction, HostId, LinkId, LinkUse, Passage, Traffic};
use paramill_core::types::Time;
use std::time::Duration;

/// The links of a star.
#[derive(Debug, Default)]
pub(super) struct Star {
    links: Vec<Link>,
}

#[derive(Debug, Clone, Default)]
struct Link {
    out_free: Time,
    in_free: Time,
    usage: LinkUse,
}

impl Star {
    /// What went over a host's link so far.
    pub(super) fn usage(&self, host: HostId) -> LinkUse {
        self.links.get(host.0 as usize).map(|link| link.usage).unwrap_or_default()
    }

    /// What went over each direction of each link so far.
    pub(super) fn traffic(&self) -> impl Iterator<Item = Traffic> {
        (0..).map(HostId).zip(&self.links).flat_map(|(host, Link { usage, .. })| {
            let up = LinkId::Host(host, Direction::Up);
            let down = LinkId::Host(host, Direction::Down);
            [
                Traffic { link: up, bytes: usage.bytes_out, busy: usage.busy_out },
                Traffic { link: down, bytes: usage.bytes_in, busy: usage.busy_in },
            ]
        })
    }

    /// Sends a frame of so many bytes, which take `time` on a link.
    pub(super) fn send(
        &mut self,
        now: Time,
        from: HostId,
        latency: Duration,
        (bytes, time): (u64, Duration),
    ) -> Passage {
        let link = self.link(from);
        let start = link.out_free.max(now);
        link.out_free = start + time;
        link.usage.bytes_out += bytes;
        link.usage.busy_out += time;
        Passage { head: start + latency, tail: start + time + latency }
    }

    /// Receives a frame whose first byte is at `to`'s link at `now`; says when its last byte is through.
    pub(super) fn receive(
        &mut self,
        now: Time,
        to: HostId,
        tail: Time,
        (bytes, time): (u64, Duration),
    ) -> Time {
        let link = self.link(to);
        let start = link.in_free.max(now);
        link.in_free = start + time;
        link.usage.bytes_in += bytes;
        link.usage.busy_in += time;
        link.in_free.max(tail)
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
    use crate::network::{Network, NetworkConfig, Parcel};
    use paramill_core::prng::Prng;

    const A: HostId = HostId(0);
    const B: HostId = HostId(1);
    const C: HostId = HostId(2);

    /// 8 Gbit/s: a byte takes a nanosecond.
    fn network() -> Network {
        let config =
            NetworkConfig { latency_us: 10.0, jitter_us: 0.0, gbit_per_s: 8.0, ..Default::default() };
        Network::star(config)
    }

    fn send(network: &mut Network, at: u64, (from, to): (HostId, HostId), payload_bytes: usize) -> Passage {
        let bytes = network.wire_bytes(None, payload_bytes);
        network.send(Time(at), Parcel { from, to, flow: 0, bytes }, &mut Prng::new(1))
    }

    #[test]
    fn frames_queue_on_the_senders_link() {
        let mut network = network();
        let first = send(&mut network, 0, (A, B), 936);
        let second = send(&mut network, 0, (A, C), 936);
        assert_eq!((first.head, first.tail), (Time(10_000), Time(11_024)));
        assert_eq!((second.head, second.tail), (Time(11_024), Time(12_048)));
        assert_eq!(network.usage(A).bytes_out, 2048);
    }

    #[test]
    fn frames_queue_on_the_receivers_link_and_are_received_while_sent() {
        let mut network = network();
        let one = send(&mut network, 0, (A, C), 936);
        let two = send(&mut network, 0, (B, C), 936);
        let one_done = network.receive(one.head, A, C, one.tail, 1024);
        let two_done = network.receive(two.head, B, C, two.tail, 1024);
        assert_eq!((one_done, two_done), (Time(11_024), Time(12_048)));
        assert_eq!(network.usage(C).busy_in, Duration::from_nanos(2048));
    }

    #[test]
    fn a_host_reaches_itself_without_a_link() {
        let mut network = network();
        let passage = send(&mut network, 5, (A, A), 1 << 20);
        assert_eq!(passage.tail, Time(1005));
        assert_eq!(network.usage(A).bytes_out, 0);
    }
}
