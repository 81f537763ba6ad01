//! Racks under edge switches, these under aggregation switches, these under a core: links that flows share.
//!
//! A flow is one direction of a connection, and takes one way: its host's link up, the uplinks of the switches up to the
//! lowest one that both hosts are under, and down again. Switches take no time but latency; within a rack there are only the
//! links of the two hosts. Each link serves frames by fair queueing between flows ([`FairLink`]), and a frame is
//! received while it is still being sent, as in the star: it begins on the next link a latency after it began on this one, and ends
//! there no earlier than it comes.
//!
//! Why queues of frames and not fluid rates: what waits for a slow link stays in that link's queue until the connection's
//! window is full, then at its sender, which uses its own link for others meanwhile. Rates come out max-min fair
//! without anybody computing them, frames keep their order and their windows as in the star, and the work for a frame does not depend on how
//! many flows there are.
//!
//! Rates are known in advance with all their changes, so that a frame's time on a link is exact also when the rate
//! changes on the way.

use super::background::{BackgroundFlow, Source};
use super::fair_link::FairLink;
use super::topology::{Position, Racks, ThreeTier};
use super::{Direction, HostId, LinkId, LinkUse, Passage, Traffic};
use crate::queue::Queue;
use paramill_core::types::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// Links on the longest way: three up, the core, three down.
const LONGEST_PATH: usize = 7;

/// The links of a three-tier network, and what is on them.
#[derive(Debug)]
pub(super) struct Tiers {
    tiers: ThreeTier,
    racks: Racks,
    host_gbit_per_s: f64,
    latency: Duration,
    links: Vec<FairLink>,
    numbers: BTreeMap<LinkId, u32>,
    /// By connection and direction.
    flows: Vec<Option<Flow>>,
    sources: Vec<Source>,
    frames: Vec<Moving>,
    free: Vec<u32>,
    steps: Queue<Step>,
    /// Frames of nodes, not of others.
    under_way: usize,
}

/// Frames that take the same way in order.
#[derive(Debug, Clone)]
pub(super) struct Flow {
    path: [u32; LONGEST_PATH],
    /// Where the flow's last frame ended on each link, as its tags count.
    tags: [u64; LONGEST_PATH],
    length: u8,
}

/// A frame on its way.
#[derive(Debug, Clone, Copy)]
struct Moving {
    owner: Owner,
    /// The link of its path that it waits for or has begun.
    hop: u8,
    bytes: u64,
    /// When its last byte has left the links before, at the earliest.
    tail: Time,
    /// Added when it arrives.
    jitter: Duration,
}

#[derive(Debug, Clone, Copy)]
enum Owner {
    /// A flow between nodes, and the world's number for the frame.
    Nodes { flow: u32, frame: u32 },
    /// A source of background traffic.
    Source(u32),
}

#[derive(Debug, Clone, Copy)]
enum Step {
    /// A frame's first byte comes to its next link.
    Head(u32),
    /// A link is free for a frame that waits.
    Free(u32),
    /// A source has something to send.
    Emit(u32),
    /// A source's frame has arrived.
    Landed(u32),
}

/// A frame that nodes exchange.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shipment {
    pub(super) flow: u32,
    pub(super) from: HostId,
    pub(super) to: HostId,
    pub(super) bytes: u64,
    pub(super) jitter: Duration,
    pub(super) frame: u32,
}

impl Tiers {
    pub(super) fn new(tiers: ThreeTier, racks: Racks, host_gbit_per_s: f64, latency: Duration) -> Tiers {
        Tiers {
            tiers,
            racks,
            host_gbit_per_s,
            latency,
            links: Vec::new(),
            numbers: BTreeMap::new(),
            flows: Vec::new(),
            sources: Vec::new(),
            frames: Vec::new(),
            free: Vec::new(),
            steps: Queue::new(),
            under_way: 0,
        }
    }

    pub(super) fn position(&self, host: HostId) -> Position {
        self.racks.position(host)
    }

    pub(super) fn set_rate(&mut self, at: Time, link: LinkId, gbit_per_s: f64) {
        let number = self.number(link);
        self.links[number as usize].set_rate(at, gbit_per_s);
    }

    pub(super) fn add_background(&mut self, background: &BackgroundFlow) {
        let flow = self.flow_between(background.from, background.to);
        let source = Source::new(background, flow);
        let number = self.sources.len() as u32;
        (0..source.first_frames()).for_each(|_| self.steps.push(background.starts, Step::Emit(number)));
        self.sources.push(source);
    }

    pub(super) fn usage(&self, host: HostId) -> LinkUse {
        let used = |direction| {
            let number = self.numbers.get(&LinkId::Host(host, direction));
            number.map_or((0, Duration::ZERO), |&number| self.links[number as usize].usage())
        };
        let ((bytes_out, busy_out), (bytes_in, busy_in)) = (used(Direction::Up), used(Direction::Down));
        LinkUse { bytes_out, bytes_in, busy_out, busy_in }
    }

    pub(super) fn traffic(&self) -> impl Iterator<Item = Traffic> {
        self.numbers.iter().map(|(&link, &number)| {
            let (bytes, busy) = self.links[number as usize].usage();
            Traffic { link, bytes, busy }
        })
    }

    /// The latency between two hosts: one more hop for each switch but the first.
    pub(super) fn latency(&self, from: HostId, to: HostId) -> Duration {
        let (from, to) = (self.position(from), self.position(to));
        let further_switches = match (from.edge == to.edge, from.aggregation == to.aggregation) {
            (true, _) => 0,
            (false, true) => 2,
            (false, false) => 4,
        };
        self.latency + self.hop() * further_switches
    }

    fn hop(&self) -> Duration {
        Duration::from_nanos((self.tiers.hop_us * 1e3) as u64)
    }

    /// Whether only background traffic is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way == 0
    }

    pub(super) fn next_time(&self) -> Option<Time> {
        self.steps.next_time()
    }

    /// A frame begins its way. Says when it is through, if that is known already.
    pub(super) fn send(&mut self, now: Time, shipment: Shipment) -> Option<(u32, Passage)> {
        let Shipment { flow, from, to, bytes, jitter, frame } = shipment;
        if self.flows.len() <= flow as usize {
            self.flows.resize(flow as usize + 1, None);
        }
        if self.flows[flow as usize].is_none() {
            self.flows[flow as usize] = Some(self.flow_between(from, to));
        }
        self.under_way += 1;
        self.begin(now, Owner::Nodes { flow, frame }, bytes, jitter)
    }

    /// Carries out what is next. Says which frame of nodes is through, and when, if one will be.
    pub(super) fn step(&mut self) -> Option<(u32, Passage)> {
        let (now, step) = self.steps.pop()?;
        match step {
            Step::Head(frame) => self.reach(now, frame),
            Step::Free(link) => {
                let (tag, frame) = self.links[link as usize].next()?;
                self.serve(now, frame, tag)
            }
            Step::Emit(source) => {
                if let Some(at) = self.sources[source as usize].next_emission(now) {
                    self.steps.push(at, Step::Emit(source));
                }
                self.emit(now, source)
            }
            Step::Landed(source) => {
                if self.sources[source as usize].landed() {
                    return self.emit(now, source);
                }
                None
            }
        }
    }

    fn emit(&mut self, now: Time, number: u32) -> Option<(u32, Passage)> {
        let source = &mut self.sources[number as usize];
        if !source.sends(now) {
            return None;
        }
        let bytes = source.frame_bytes;
        self.begin(now, Owner::Source(number), bytes, Duration::ZERO)
    }

    fn begin(&mut self, now: Time, owner: Owner, bytes: u64, jitter: Duration) -> Option<(u32, Passage)> {
        let moving = Moving { owner, hop: 0, bytes, tail: now, jitter };
        let frame = match self.free.pop() {
            Some(frame) => {
                self.frames[frame as usize] = moving;
                frame
            }
            None => {
                self.frames.push(moving);
                (self.frames.len() - 1) as u32
            }
        };
        self.reach(now, frame)
    }

    /// A frame's first byte is at its next link.
    fn reach(&mut self, now: Time, frame: u32) -> Option<(u32, Passage)> {
        let Moving { owner, hop, bytes, .. } = self.frames[frame as usize];
        let hop = usize::from(hop);
        let flow = flow_of(&mut self.flows, &mut self.sources, owner);
        let number = flow.path[hop];
        let link = &mut self.links[number as usize];
        let tag = link.tag(now, flow.tags[hop]);
        flow.tags[hop] = tag + bytes;
        if link.is_free(now) {
            return self.serve(now, frame, tag);
        }
        if let Some(at) = link.wait(tag, frame) {
            self.steps.push(at, Step::Free(number));
        }
        None
    }

    /// A link takes a frame.
    fn serve(&mut self, now: Time, frame: u32, tag: u64) -> Option<(u32, Passage)> {
        let hop_latency = self.hop();
        let moving = &mut self.frames[frame as usize];
        let hop = usize::from(moving.hop);
        let flow = flow_of(&mut self.flows, &mut self.sources, moving.owner);
        let (number, length) = (flow.path[hop], usize::from(flow.length));
        let link = &mut self.links[number as usize];
        moving.tail = moving.tail.max(link.serve(now, tag, moving.bytes));
        if let Some(at) = link.next_time() {
            self.steps.push(at, Step::Free(number));
        }
        if hop + 1 < length {
            let is_core = length == LONGEST_PATH && hop == LONGEST_PATH / 2;
            // The core is a link and a switch: only the way to it counts.
            let latency = match hop {
                0 => self.latency,
                _ if is_core => Duration::ZERO,
                _ => hop_latency,
            };
            moving.hop += 1;
            moving.tail = moving.tail + latency;
            self.steps.push(now + latency, Step::Head(frame));
            return None;
        }
        let through = moving.tail + moving.jitter;
        self.free.push(frame);
        match moving.owner {
            Owner::Nodes { frame, .. } => {
                self.under_way -= 1;
                Some((frame, Passage { head: through, tail: through }))
            }
            Owner::Source(source) => {
                self.steps.push(through, Step::Landed(source));
                None
            }
        }
    }

    fn flow_between(&mut self, from: HostId, to: HostId) -> Flow {
        let (here, there) = (self.position(from), self.position(to));
        let mut links = vec![LinkId::Host(from, Direction::Up)];
        if here.edge != there.edge {
            links.push(LinkId::Edge(here.edge, Direction::Up));
            if here.aggregation != there.aggregation {
                links.push(LinkId::Aggregation(here.aggregation, Direction::Up));
                // A core without a rate is no link that anything could wait for.
                links.extend((self.tiers.core_gbit_per_s > 0.0).then_some(LinkId::Core));
                links.push(LinkId::Aggregation(there.aggregation, Direction::Down));
            }
            links.push(LinkId::Edge(there.edge, Direction::Down));
        }
        links.push(LinkId::Host(to, Direction::Down));
        let mut flow = Flow { path: [0; LONGEST_PATH], tags: [0; LONGEST_PATH], length: links.len() as u8 };
        for (place, link) in flow.path.iter_mut().zip(links) {
            *place = self.number(link);
        }
        flow
    }

    fn number(&mut self, link: LinkId) -> u32 {
        let rate = match link {
            LinkId::Host(..) => self.host_gbit_per_s,
            LinkId::Edge(..) => self.tiers.edge_uplink(self.host_gbit_per_s),
            LinkId::Aggregation(..) => self.tiers.aggregation_uplink(self.host_gbit_per_s),
            LinkId::Core => self.tiers.core_gbit_per_s,
        };
        let next = self.links.len() as u32;
        let number = *self.numbers.entry(link).or_insert(next);
        if number == next {
            self.links.push(FairLink::new(rate));
        }
        number
    }
}

fn flow_of<'a>(flows: &'a mut [Option<Flow>], sources: &'a mut [Source], owner: Owner) -> &'a mut Flow {
    match owner {
        Owner::Nodes { flow, .. } => {
            flows[flow as usize].as_mut().expect("a flow is known from its first frame on")
        }
        Owner::Source(source) => &mut sources[source as usize].flow,
    }
}
