//! A shard and the frames of synchronous workers, without sockets: what a data core has to do, and nothing else.

use paramill_core::absence::Absent;
use paramill_core::codec::{Codec, Context, Encoder, PREFIX_BYTES};
use paramill_core::placement::Part;
use paramill_core::policy::{Axis, Policy};
use paramill_core::prng::Prng;
use paramill_core::registry::Registry;
use paramill_core::role::{Output, Role};
use paramill_core::server::{Shard, ShardConfig};
use paramill_core::store::Buffer;
use paramill_core::table::TableSpec;
use paramill_core::types::{Clock, NodeId, ProcessId, ServerId, ShardId, TableId, Time, WorkerId};
use paramill_core::wire::control::frame;
use paramill_core::wire::{Control, DType, Flags, Header, Kind, Member, Plan, ServedShard, Welcome};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What one read from a socket brings of one worker before it is another's turn.
const READ_BYTES: usize = 1 << 20;
const CHUNK: usize = paramill_core::limits::BLOCK_ELEMENTS;

/// What is pushed and pulled.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    /// Number of workers.
    pub(crate) workers: u32,
    /// Number of tables.
    pub(crate) tables: u32,
    /// Elements in each.
    pub(crate) elements: usize,
    /// Policy of all tables.
    pub(crate) policy: Policy,
}

/// A shard that has its initial values, and the workers' next frames.
pub(crate) struct Load {
    shard: Shard,
    work: Work,
    /// Table, chunk, first element, elements and whether it is the table's last.
    chunks: Vec<(u32, u32, usize, usize, bool)>,
    gradients: Vec<Buffer>,
    /// What a codec makes of a chunk, by its elements; nothing when the tables have none.
    encoded: BTreeMap<usize, Vec<u8>>,
    /// The element type of what it makes, where that is all it is.
    elements: Option<DType>,
    clock: Clock,
    /// A chunk that the next round's gradients do not have.
    lacks: Option<usize>,
}

/// What came of a round.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Push frames handed in.
    pub(crate) frames: u64,
    /// Frames of parameters.
    pub(crate) answers: u64,
    /// Answers that are complete with them.
    pub(crate) completed: u64,
    /// Frames that acknowledge several pushes.
    pub(crate) lists: u64,
}

impl Load {
    /// Starts a shard as a coordinator would.
    pub(crate) fn new(work: Work) -> Load {
        let id = ShardId { server: ServerId(0), core: 0 };
        let config = ShardConfig {
            job: "cost".into(),
            process: ProcessId(1),
            server: Some(id.server),
            core: 0,
            cores: 1,
            addresses: ["here".to_owned()].into_iter().collect(),
            coordinator: "there".into(),
            digest_every: 0,
        };
        let mut shard = Shard::new(Time::ZERO, config, Arc::new(Registry::builtin()));
        let welcome = Welcome { you: NodeId::Shard(id), incarnation: 1, session: 0 };
        shard.handle_connected(Time::ZERO, NodeId::Coordinator.into(), &welcome);
        let part = Part { server: id.server, start: 0, len: work.elements as u64 };
        let tables = 0..work.tables;
        let plan = Plan {
            epoch: 1,
            tables: tables
                .clone()
                .map(|n| TableSpec::dense(format!("table{n}"), [work.elements as u64]))
                .collect(),
            parts: tables.clone().map(|_| vec![part]).collect(),
            whole: vec![],
            shards: vec![ServedShard::original(id, ProcessId(1), "here".into())],
            workers: work.workers,
            members: (0..work.workers).map(|rank| Member::original(WorkerId(rank), 1)).collect(),
            policy: work.policy.clone(),
            overrides: Vec::new(),
            switches: Vec::new(),
            seed: 1,
            resumed: None,
        };
        let message = frame(Kind::Control, &Control::Plan(Box::new(plan)));
        let bytes = message.body.bytes().expect("a control message has its bytes with it");
        shard.handle_frame(Time::ZERO, NodeId::Coordinator.into(), &message.header, bytes);
        let chunks = tables.flat_map(|table| {
            let count = work.elements.div_ceil(CHUNK);
            (0..count).map(move |chunk| {
                let start = chunk * CHUNK;
                let len = CHUNK.min(work.elements - start);
                (table, chunk as u32, start, len, chunk + 1 == count)
            })
        });
        let chunks: Vec<_> = chunks.collect();
        // Small enough to stay in cache, as a receive buffer does.
        let mut gradient = Buffer::zeroed(READ_BYTES / 4);
        for (at, value) in gradient.as_mut_slice().iter_mut().enumerate() {
            *value = (at % 251) as f32 / 1000.0 - 0.1;
        }
        let gradients = (0..work.workers.min(4)).map(|_| gradient.clone()).collect();
        let codec = Codec::parse(&Registry::builtin().codec, work.policy.get(Axis::Codec)).expect("a codec");
        let elements = codec.element_type();
        let encoded = encoded(codec, chunks.iter().map(|chunk| chunk.3));
        let mut load = Load { shard, work, chunks, gradients, encoded, elements, clock: 0, lacks: None };
        for index in 0..load.chunks.len() {
            let (header, start, bytes) = load.frame(Kind::Init, index, 0);
            let payload = &load.gradients[0].as_bytes()[start..start + bytes];
            load.shard.handle_frame(Time::ZERO, NodeId::Worker(WorkerId(0)).into(), &header, payload);
        }
        while load.shard.poll_output().is_some() {}
        load
    }

    /// Number of push frames in a round.
    pub(crate) fn frames_per_round(&self) -> u64 {
        self.chunks.len() as u64 * u64::from(self.work.workers)
    }

    /// Number of gradient elements in a round.
    pub(crate) fn elements_per_round(&self) -> u64 {
        u64::from(self.work.tables) * self.work.elements as u64 * u64::from(self.work.workers)
    }

    /// Bytes held for parameters, accumulators and optimizer state.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.shard.memory_bytes()
    }

    /// The gradients of the next round do not have this chunk.
    #[allow(dead_code, reason = "a test that shares this file looks at it")]
    pub(crate) fn lack(&mut self, index: usize) {
        self.lacks = Some(index);
    }

    /// Every worker pushes and pulls everything once.
    pub(crate) fn round(&mut self) -> Tally {
        let mut tally = Tally::default();
        let mut begin = 0;
        while begin < self.chunks.len() {
            let mut end = begin;
            let mut bytes = 0;
            while end < self.chunks.len() && bytes < READ_BYTES - CHUNK * 4 {
                bytes += self.chunks[end].3 * 4;
                end += 1;
            }
            for rank in 0..self.work.workers {
                for index in begin..end {
                    let (mut header, start, bytes) = self.frame(Kind::Push, index, index - begin);
                    let buffer = &self.gradients[rank as usize % self.gradients.len()];
                    let mut payload = &buffer.as_bytes()[start..start + bytes];
                    if let Some(encoded) = self.encoded.get(&self.chunks[index].3) {
                        payload = encoded;
                        match self.elements {
                            Some(dtype) => header.dtype = dtype,
                            None => header.flags = header.flags.with(Flags::ENCODED),
                        }
                        header.payload_bytes = encoded.len() as u32;
                    }
                    let mut list = Vec::new();
                    if self.lacks == Some(index) {
                        let len = self.chunks[index].3;
                        Absent::in_chunk(std::slice::from_ref(&(0..len)), 0..len).write(&mut list);
                        payload = &list;
                        header.flags = header.flags.with(Flags::ABSENT);
                        header.payload_bytes = list.len() as u32;
                    }
                    let now = Time(self.clock * 1000);
                    self.shard.handle_frame(now, NodeId::Worker(WorkerId(rank)).into(), &header, payload);
                    tally.frames += 1;
                }
                self.drain(&mut tally);
            }
            begin = end;
        }
        self.clock += 1;
        self.lacks = None;
        tally
    }

    /// Takes what the shard wants sent, as a driver that writes it at once.
    fn drain(&mut self, tally: &mut Tally) {
        while let Some(output) = self.shard.poll_output() {
            let Output::Send { frame, .. } = output else { continue };
            match frame.header.kind {
                Kind::PushAck => tally.lists += u64::from(frame.header.payload_bytes > 0),
                Kind::Params => {
                    tally.answers += 1;
                    tally.completed += u64::from(frame.header.flags.has(Flags::LAST));
                }
                kind => panic!("a {kind:?} frame"),
            }
        }
    }

    fn frame(&self, kind: Kind, index: usize, place: usize) -> (Header, usize, usize) {
        let (table, chunk, _, len, last) = self.chunks[index];
        let mut header = Header::new(kind);
        header.epoch = 1;
        header.table = TableId(table);
        header.chunk = chunk;
        header.part = chunk;
        header.clock = self.clock;
        header.request = 1 + u64::from(table);
        header.flags = Flags::WANT_PARAMS;
        if last {
            header.flags = header.flags.with(Flags::LAST);
        }
        header.payload_bytes = (len * 4) as u32;
        // Frames of one read lie one after the other.
        let start = (place * len.next_multiple_of(16) * 4) % (READ_BYTES - CHUNK * 4);
        (header, start.next_multiple_of(64), len * 4)
    }
}

/// What a codec makes of chunks of these lengths: values as gradients have them, most of them small.
fn encoded(codec: Codec, lengths: impl Iterator<Item = usize>) -> BTreeMap<usize, Vec<u8>> {
    if codec.is_none() {
        return BTreeMap::new();
    }
    let codec = Arc::new(codec);
    let encode = |len: usize| {
        let mut prng = Prng::new(len as u64);
        let values: Vec<f32> = (0..len).map(|_| prng.normal() as f32 * 0.01).collect();
        let (mut payload, context) =
            (Vec::new(), Context { layer_elements: len as u64, ..Context::default() });
        Encoder::new(codec.clone(), len).encode(0, &values, &context, &mut payload).expect("finite values");
        // Elements travel without a codec's prefix.
        let payload = if codec.element_type().is_some() { payload.split_off(PREFIX_BYTES) } else { payload };
        (len, payload)
    };
    lengths.collect::<BTreeSet<_>>().into_iter().map(encode).collect()
}
