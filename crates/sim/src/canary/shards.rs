//! Bugs of a shard.

use super::broken::Bug;
use super::{Broken, Canary};
use paramill_core::limits;
use paramill_core::role::{Body, Output, Role};
use paramill_core::server::Shard;
use paramill_core::types::{Clock, ConnectionId, NodeId, TableId, Time, WorkerId};
use paramill_core::wire::{Flags, Header, Kind, ack, group};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A bug of a shard.
#[derive(Debug)]
pub struct ShardBug {
    canary: Canary,
    /// Frames of pushes that came before.
    seen: BTreeSet<(ConnectionId, TableId, Clock, u32)>,
    /// Gradients that came again, to be added to the next push of the same chunk.
    again: BTreeMap<(ConnectionId, TableId, u32), Vec<f32>>,
    pulls: u64,
    /// The shard before the last frame of its last push.
    image: Option<Vec<u8>>,
    /// Frames that the shard itself does not know of.
    outputs: VecDeque<Output>,
}

impl ShardBug {
    /// A bug that has not done anything yet.
    pub fn new(canary: Canary) -> ShardBug {
        ShardBug {
            canary,
            seen: BTreeSet::new(),
            again: BTreeMap::new(),
            pulls: 0,
            image: None,
            outputs: VecDeque::new(),
        }
    }

    fn apply_again(
        &mut self,
        shard: &mut Shard,
        now: Time,
        connection: ConnectionId,
        header: &Header,
        payload: &[u8],
    ) {
        let place = (connection, header.table, header.chunk);
        // What a codec made has no sum.
        let dense = !header.flags.has(Flags::ROWS) && !header.flags.has(Flags::ENCODED);
        let values = |bytes: &[u8]| -> Vec<f32> {
            bytes
                .chunks_exact(4)
                .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
                .collect()
        };
        if !self.seen.insert((connection, header.table, header.clock, header.part)) {
            if dense {
                self.again.insert(place, values(payload));
            }
            return shard.handle_frame(now, connection, header, payload);
        }
        match self.again.remove(&place) {
            Some(again) if dense => {
                let sum =
                    values(payload).iter().zip(&again).map(|(one, other)| one + other).collect::<Vec<_>>();
                let bytes: Vec<u8> = sum.iter().flat_map(|value| value.to_le_bytes()).collect();
                shard.handle_frame(now, connection, header, &bytes);
            }
            _ => shard.handle_frame(now, connection, header, payload),
        }
    }

    fn answer_at_once(
        &mut self,
        shard: &mut Shard,
        now: Time,
        connection: ConnectionId,
        header: &Header,
        payload: &[u8],
    ) {
        let mut frame = *header;
        if header.kind == Kind::Pull {
            frame.flags = frame.flags.with(Flags::NOW);
            return shard.handle_frame(now, connection, &frame, payload);
        }
        let wants = header.flags.has(Flags::WANT_PARAMS);
        frame.flags = Flags(frame.flags.0 & !Flags::WANT_PARAMS.0);
        shard.handle_frame(now, connection, &frame, payload);
        if wants && header.flags.has(Flags::LAST) {
            let mut pull = Header { kind: Kind::Pull, flags: Flags::NOW, payload_bytes: 0, ..*header };
            pull.clock += 1;
            shard.handle_frame(now, connection, &pull, &[]);
        }
    }

    fn forget_some(
        &mut self,
        shard: &mut Shard,
        now: Time,
        connection: ConnectionId,
        header: &Header,
        payload: &[u8],
    ) {
        let mut frame = *header;
        let is_pull = header.kind == Kind::Pull || header.flags.has(Flags::WANT_PARAMS.with(Flags::LAST));
        self.pulls += u64::from(is_pull);
        if is_pull && self.pulls.is_multiple_of(10) {
            if header.kind == Kind::Pull {
                return;
            }
            frame.flags = Flags(frame.flags.0 & !Flags::WANT_PARAMS.0);
        }
        shard.handle_frame(now, connection, &frame, payload);
    }
}

impl Broken<Shard, ShardBug> {
    /// The image that another process would go on from.
    pub fn image(&self) -> Vec<u8> {
        let dated = self.bug().image.clone().filter(|_| self.bug().canary == Canary::Dated);
        dated.unwrap_or_else(|| self.role().image().encode())
    }
}

impl Bug<Shard> for ShardBug {
    fn handle_frame(
        &mut self,
        shard: &mut Shard,
        now: Time,
        connection: ConnectionId,
        header: &Header,
        payload: &[u8],
    ) {
        match (self.canary, header.kind) {
            (Canary::Forgetful, Kind::Push) => self.apply_again(shard, now, connection, header, payload),
            (Canary::Hasty, Kind::Push | Kind::Pull) => {
                self.answer_at_once(shard, now, connection, header, payload)
            }
            (Canary::Absent, Kind::Push | Kind::Pull) => {
                self.forget_some(shard, now, connection, header, payload)
            }
            (Canary::Early, Kind::Push) => {
                if header.part == 0 && !header.flags.has(Flags::LAST) {
                    let frame = ack::frame(&[header.request]);
                    self.outputs.push_back(Output::send(connection, frame));
                }
                shard.handle_frame(now, connection, header, payload);
            }
            (Canary::Dated, Kind::Push) => {
                if header.flags.has(Flags::LAST) {
                    self.image = Some(shard.image().encode());
                }
                shard.handle_frame(now, connection, header, payload);
            }
            (Canary::Outdated, Kind::Push) => {
                let header = Header { epoch: shard.epoch(), ..*header };
                shard.handle_frame(now, connection, &header, payload);
            }
            (Canary::Anonymous, Kind::Contributors) => {
                // As many as there are, and no members.
                let count = payload.len() as u32 / 4;
                let ranks: Vec<WorkerId> =
                    (limits::MAX_WORKERS - count..limits::MAX_WORKERS).map(WorkerId).collect();
                shard.handle_frame(now, connection, header, &group::encode_ranks(&ranks));
            }
            _ => shard.handle_frame(now, connection, header, payload),
        }
    }

    fn poll_output(&mut self, shard: &mut Shard, _now: Time) -> Option<Output> {
        let mut output = self.outputs.pop_front().or_else(|| shard.poll_output())?;
        if let Output::Send { to: ConnectionId::Node(NodeId::Worker(WorkerId(0))), frame, .. } = &mut output
            && frame.header.kind == Kind::Params
            && self.canary == Canary::Partial
            && !frame.header.flags.has(Flags::ENCODED)
        {
            let mut bytes = shard.payload(&frame.body).to_vec();
            // The lowest bit of the first value.
            bytes.first_mut().into_iter().for_each(|byte| *byte ^= 1);
            frame.body = Body::Bytes(bytes);
        }
        Some(output)
    }

    fn refresh(&self, shard: &Shard, header: &mut Header) {
        if self.canary != Canary::Stale {
            shard.refresh(header);
        }
    }
}
