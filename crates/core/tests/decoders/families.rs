//! Decoders by family. Each takes any bytes, and panics where a decoder does not keep its word: it reads them or refuses
//! them, changes nothing that it refuses, and gives nothing that is not finite.
//!
//! The fuzz targets in `fuzz/` and the seeded loops beside this file call the same functions.

#![allow(unreachable_pub, reason = "fuzz targets are other crates")]

use paramill_core::absence::Absent;
use paramill_core::bandwidth::{Probe, Reading};
use paramill_core::codec::{
    self, Codec, Context, Decoder, Encoder, Factors, LayerRange, Products, TableGradient, Written,
};
use paramill_core::hands::Alone;
use paramill_core::kernels;
use paramill_core::prng::Prng;
use paramill_core::registry::Registry;
use paramill_core::types::{ServerId, ShardId, TableId, WorkerId};
use paramill_core::wire::control::{self, frame};
use paramill_core::wire::{
    Cause, Control, DESCRIPTOR_BYTES, Descriptor, Fault, HEADER_BYTES, Header, Hello, Kind, Party, Position,
    Refusal, Relay, Route, Welcome, ack, group,
};
use std::sync::Arc;

/// Elements of a stretch.
const ENTRIES: usize = 150;

/// A family of decoders. The first byte of an input says which of them reads the rest.
pub trait Family {
    /// Whether the bytes were read; they were refused if not.
    fn check(&mut self, input: &[u8]) -> bool;

    /// Inputs that are read.
    fn good(&self) -> Vec<Vec<u8>>;
}

/// All families by name.
pub fn families() -> Vec<(&'static str, Box<dyn Family>)> {
    vec![
        ("sparse", Box::new(Chains::new(SPARSE))),
        ("quantised", Box::new(Chains::new(QUANTISED))),
        ("packed", Box::new(Chains::new(PACKED))),
        ("low_rank", Box::new(Chains::new(LOW_RANK))),
        ("delta", Box::new(Deltas::new())),
        ("frames", Box::new(Frames)),
    ]
}

/// One of [`families`].
pub fn family(name: &str) -> Box<dyn Family> {
    families().into_iter().find(|(of, _)| *of == name).expect("a family of this name").1
}

/// Chains whose payloads have places in them.
pub const SPARSE: &[&str] = &[
    "topk:0.05",
    "threshold:0.5+bitmap",
    "index",
    "dvf:delta=0.5+hybrid",
    "randk:0.1",
    "dgc:ratio=0.1,warmup=0",
    "significance:0.1",
    "ef+topk:0.1+dense",
    "auto",
];

/// Chains whose values are codes.
pub const QUANTISED: &[&str] = &[
    "f16",
    "bf16",
    "int8",
    "onebit",
    "qsgd:levels=4",
    "terngrad",
    "topk:0.1+int8",
    "threshold:0.5+qsgd:levels=8",
    "clip:norm=1+terngrad",
    "delta:dtype=bf16",
];

/// Chains whose payloads are compressed.
pub const PACKED: &[&str] = &[
    "lossless+snappy",
    "bitmap+lz4",
    "lossless+zstd",
    "f16+zstd",
    "topk:0.2+f16+lz4",
    "min-size:4+int8+snappy",
];

/// Chains that send two thin matrices, and those that stand aside.
pub const LOW_RANK: &[&str] =
    &["powersgd:rank=1", "powersgd:rank=2+bf16", "factors:rank=4", "warmup:10+topk:0.1", "none"];

/// Both ends of some chains.
struct Chains {
    decoders: Vec<ChainEnd>,
}

struct ChainEnd {
    decoder: Decoder,
    tag: [u8; 2],
    /// Factors that came before, where the chain makes such.
    products: Products,
}

impl Chains {
    fn new(chains: &[&str]) -> Chains {
        let axis = Registry::builtin().codec;
        let end = |text: &&str| {
            let codec = Arc::new(Codec::parse(&axis, text).unwrap_or_else(|error| panic!("{text}: {error}")));
            let (mut decoder, mut products) = (Decoder::new(codec.clone()), Products::default());
            let mut payloads = payloads(&codec, &[1.0; ENTRIES]);
            let chunk = payloads.pop().expect("a chunk has a payload");
            for factors in payloads {
                decoder.take_factors(&factors, &layers(), &mut products).expect("good factors");
            }
            ChainEnd { decoder, tag: [chunk[2], chunk[3]], products }
        };
        Chains { decoders: chains.iter().map(end).collect() }
    }
}

/// The stretch as a layer.
fn layers() -> [LayerRange; 1] {
    [LayerRange { elements: 0..ENTRIES, columns: 10 }]
}

/// What a chain makes of some values: pieces of factors, if any, and then the payload of a chunk.
fn payloads(codec: &Arc<Codec>, values: &[f32]) -> Vec<Vec<u8>> {
    let (u, v) = ([0.5; ENTRIES / 10], [-2.0; 10]);
    let (layers, chunk) = (layers(), 0..ENTRIES);
    let chunks = std::slice::from_ref(&chunk);
    let gradient = TableGradient {
        values,
        clips_non_finite: false,
        absent: &[],
        layers: &layers,
        chunks,
        factors: Some(Factors { rank: 1, u: &u, v: &v }),
        step: 20,
        seed: 7,
    };
    let context = |_| Context { step: 20, seed: 7, layer_elements: 1000, ..Context::default() };
    let mut bytes = Written::default();
    let encoded =
        Encoder::new(codec.clone(), values.len()).encode_table(&gradient, context, &Alone, &mut bytes);
    let (factors, chunks) = encoded.unwrap_or_else(|error| panic!("{codec}: {error}"));
    let factors = factors.into_iter().flat_map(|layer| layer.payloads);
    factors.chain(chunks).map(|range| bytes.get(range).to_vec()).collect()
}

impl Family for Chains {
    fn check(&mut self, input: &[u8]) -> bool {
        let Some((&which, rest)) = input.split_first() else { return false };
        let count = self.decoders.len();
        let ChainEnd { decoder, tag, products } = &mut self.decoders[usize::from(which & 0x7f) % count];
        let mut payload = rest.to_vec();
        if which & 0x80 == 0 && payload.len() > 4 {
            // Who guesses at a chain's tag learns nothing about the rest.
            payload[2..4].copy_from_slice(tag);
        }
        if codec::is_factors(&payload) {
            let mut taken = products.clone();
            let is_taken = decoder.take_factors(&payload, &layers(), &mut taken).is_ok();
            assert!(is_taken || taken == *products, "{}: {payload:?}", decoder.codec());
            return is_taken;
        }
        let before: Vec<f32> = (0..ENTRIES).map(|at| at as f32 - 70.0).collect();
        let (mut sum, mut values) = (before.clone(), before.clone());
        let added =
            decoder.read_chunk(&payload, 0..ENTRIES, products).map(|content| content.add_to(&mut sum));
        let decoded =
            decoder.read_chunk(&payload, 0..ENTRIES, products).map(|content| content.copy_to(&mut values));
        assert_eq!(added, decoded, "{}: {payload:?}", decoder.codec());
        if added.is_err() {
            assert_eq!((&sum, &values), (&before, &before), "{}: {payload:?}", decoder.codec());
            return false;
        }
        assert!(kernels::all_finite(&values), "{}: {payload:?}", decoder.codec());
        for at in 0..ENTRIES {
            assert_eq!(sum[at], before[at] + values[at], "{}: {payload:?}", decoder.codec());
        }
        true
    }

    fn good(&self) -> Vec<Vec<u8>> {
        let mut prng = Prng::new(5);
        let normal: Vec<f32> = (0..ENTRIES).map(|_| prng.normal() as f32).collect();
        let rare = normal.iter().map(|&value| if value > 1.0 { value } else { 0.0 }).collect();
        let product = (0..ENTRIES).map(|at| (1 + at / 10) as f32 * normal[at % 10]).collect();
        let values: [Vec<f32>; 4] = [normal.clone(), rare, product, vec![0.25; ENTRIES]];
        let with = |(which, end): (usize, &ChainEnd)| {
            let inputs = |values: &Vec<f32>| {
                let payloads = payloads(end.decoder.codec(), values);
                payloads.into_iter().map(move |payload| [vec![which as u8], payload].concat())
            };
            values.iter().flat_map(inputs).collect::<Vec<_>>()
        };
        self.decoders.iter().enumerate().flat_map(with).collect()
    }
}

/// Deltas onto some weights of each element type.
struct Deltas {
    decoders: Vec<Decoder>,
    held: Vec<f32>,
}

impl Deltas {
    fn new() -> Deltas {
        let (axis, mut prng) = (Registry::builtin().codec, Prng::new(9));
        let held = (0..ENTRIES).map(|_| if prng.chance(0.5) { 1.0 } else { -0.5 }).collect();
        let decoder = |dtype: &str| {
            let codec = Codec::for_answers(&axis, &format!("delta:dtype={dtype}")).expect("a codec");
            Decoder::new(Arc::new(codec))
        };
        Deltas { decoders: ["f32", "f16", "bf16"].map(decoder).into(), held }
    }
}

impl Family for Deltas {
    fn check(&mut self, input: &[u8]) -> bool {
        let Some((&which, delta)) = input.split_first() else { return false };
        let count = self.decoders.len();
        let mut held = self.held.clone();
        let is_read = self.decoders[usize::from(which) % count].decode_onto(delta, &mut held).is_ok();
        assert!(kernels::all_finite(&held), "{delta:?}");
        assert!(is_read || held == self.held, "{delta:?}");
        is_read
    }

    fn good(&self) -> Vec<Vec<u8>> {
        let mut inputs = Vec::new();
        for (which, decoder) in (0u8..).zip(&self.decoders) {
            let width = if which == 0 { 4 } else { 2 };
            let zeros = [0; ENTRIES];
            let head = payloads(decoder.codec(), &zeros.map(|_: i32| 1.0))[0][..8].to_vec();
            let mut add = |layout: u8, count: usize, places: &[u8]| {
                let mut input = vec![which, layout, 0, head[2], head[3], count as u8, 0, 0, 0];
                input.extend_from_slice(places);
                input.extend(std::iter::repeat_n(0, width * count));
                inputs.push(input);
            };
            add(7, 3, &[0, 100, 40]);
            add(7, 1, &[149]);
            add(3, 2, &[5, 0, 149, 0]);
            add(1, ENTRIES, &[]);
            add(7, 0, &[]);
        }
        inputs
    }
}

/// Headers and what is not data.
struct Frames;

impl Family for Frames {
    fn check(&mut self, input: &[u8]) -> bool {
        let Some((&which, rest)) = input.split_first() else { return false };
        match which % 9 {
            0 => {
                let Some((head, payload)) = rest.split_first_chunk::<HEADER_BYTES>() else { return false };
                let Ok(header) = Header::decode(head) else { return false };
                assert_eq!(header.encode(), *head, "what is read is written the same");
                ack::requests(&header, payload).map(Iterator::count).is_ok() || header.kind != Kind::PushAck
            }
            1 => {
                let Ok(entries) = group::decode(rest) else { return false };
                assert_eq!(group::encode(entries), rest);
                true
            }
            2 => {
                let Some(bytes) = rest.first_chunk::<DESCRIPTOR_BYTES>() else { return false };
                Descriptor::decode(bytes).is_ok()
            }
            3 => control::decode::<Hello>("hello", rest).is_ok(),
            4 => control::decode::<Welcome>("welcome", rest).is_ok(),
            5 => control::decode::<Refusal>("refusal", rest).is_ok(),
            6 => control::decode::<Fault>("error", rest).is_ok(),
            7 => control::decode::<Control>("control message", rest).is_ok(),
            _ => {
                let Ok((absent, gradient)) = Absent::read(rest, ENTRIES) else { return false };
                let mut chunk = [1.0; ENTRIES];
                absent.clear_in(&mut chunk);
                let cleared = chunk.iter().filter(|&&value| value == 0.0).count();
                assert_eq!(cleared, absent.ranges().iter().map(ExactSizeIterator::len).sum::<usize>());
                let mut written = Vec::new();
                absent.write(&mut written);
                assert_eq!([&written, gradient].concat(), rest, "what is read is written the same");
                true
            }
        }
    }

    fn good(&self) -> Vec<Vec<u8>> {
        let mut list = vec![8];
        Absent::in_chunk(&[0..3, 10..50, 149..150], 0..ENTRIES).write(&mut list);
        let bytes = |body: &paramill_core::role::Body| body.bytes().expect("it has its bytes").to_vec();
        let acks = ack::frame(&[1, 2, 3]);
        let entry = group::Entry { worker: WorkerId(3), want_params: true, request: 9 };
        let hello = Hello {
            job: "job".into(),
            from: Party::Worker { rank: Some(WorkerId(1)) },
            incarnation: 7,
            to: None,
        };
        let fault = Fault { cause: Cause::Shape, message: "no".into() };
        let refusal = Refusal { reason: "no".into(), retry: true };
        let barrier = Control::Barrier { name: "end".into(), number: 3 };
        let shard = ShardId { server: ServerId(1), core: 0 };
        let position = Position { table: TableId(2), epoch: 1, version: Some(7) };
        let relay = Relay { worker: WorkerId(4), addresses: "203.0.113.4:7100".into() };
        let probe = Probe { train: 1, index: 3, sent: 99, rate: 6_250_000, padding: vec![0; 40] };
        let reading = Reading::Probe { rate: 6_250_000, is_delayed: true, is_disturbed: false };
        let streams = [
            Control::Subscribe { shard, positions: vec![position], is_question: true },
            Control::Seen { shard, table: TableId(2), version: 7 },
            Control::Routes(vec![Route { shard, tables: vec![TableId(2)], relay: Some(relay) }]),
            Control::Probe(probe),
            Control::Measured(reading),
            Control::Behind { lacking: Some(reading) },
        ];
        let streams = streams.map(|message| [vec![7], bytes(&frame(Kind::Control, &message).body)].concat());
        let mut good = vec![
            [vec![0], acks.header.encode().to_vec(), bytes(&acks.body)].concat(),
            [list, vec![0; 16]].concat(),
            [vec![0], Header::new(Kind::Push).encode().to_vec()].concat(),
            [vec![1], group::encode([entry])].concat(),
            [vec![3], bytes(&frame(Kind::Control, &hello).body)].concat(),
            [vec![5], bytes(&frame(Kind::Control, &refusal).body)].concat(),
            [vec![6], bytes(&frame(Kind::Error, &fault).body)].concat(),
            [vec![7], bytes(&frame(Kind::Control, &barrier).body)].concat(),
            [vec![7], bytes(&frame(Kind::Control, &Control::StatusQuery).body)].concat(),
        ];
        good.extend(streams);
        good
    }
}
