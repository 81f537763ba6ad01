//! Pushes that a codec made are what they stand for, whatever becomes of them here.

use super::*;
use crate::codec::{Codec, Context, Decoder, Encoder};
use crate::prng::Prng;
use std::sync::Arc;

const LEN: usize = 70;
const WORKERS: u32 = 3;

/// A table of three chunks, and both ends of a codec.
struct Pair {
    accumulators: Accumulators,
    table: TableShard,
}

impl Pair {
    fn new(policy: Policy) -> Pair {
        let shard = ShardId { server: ServerId(0), core: 0 };
        let start = |number: u32| u64::from(number) * LEN as u64;
        let chunks =
            (0..CHUNKS).map(|number| (number, Chunk { shard, start: start(number), len: LEN as u32 }));
        let spec = TableSpec::dense("w", [u64::from(CHUNKS) * LEN as u64]);
        let workers = (0..WORKERS).map(WorkerId);
        let table = TableShard::new(&Registry::builtin(), spec, policy, chunks, workers, 1).unwrap();
        let mut pair = Pair { table, accumulators: Accumulators::default() };
        for number in 0..CHUNKS {
            let ones = [1.0f32; LEN];
            pair.table.initialise(piece(number), bytemuck::cast_slice(&ones)).unwrap();
        }
        pair
    }

    fn take(&mut self, worker: u32, header: &Header, payload: &[u8]) -> Result<Taken, Fault> {
        let taken = push_frame(&mut self.table, worker, header, payload, &mut self.accumulators);
        while self.table.advance(Time::ZERO, &mut self.accumulators).is_some() {}
        taken
    }

    fn take_encoded(&mut self, worker: u32, clock: Clock, part: u32, payload: &[u8]) -> Result<Taken, Fault> {
        let mut header = header(clock, part);
        header.flags = header.flags.with(Flags::ENCODED);
        self.take(worker, &header, payload)
    }

    fn parameters(&self) -> &[f32] {
        self.table.store.parameters()
    }
}

fn encoder(codec: &str) -> (Arc<Codec>, Encoder) {
    let codec = Arc::new(Codec::parse(&Registry::builtin().codec, codec).unwrap());
    (codec.clone(), Encoder::new(codec, CHUNKS as usize * LEN))
}

fn payload(encoder: &mut Encoder, prng: &mut Prng, clock: Clock, part: u32) -> Vec<u8> {
    let values: Vec<f32> = (0..LEN).map(|_| prng.normal() as f32).collect();
    let context = Context { step: clock, seed: prng.next_u64(), layer_elements: 210, ..Context::default() };
    let mut payload = Vec::new();
    encoder.encode(part as usize * LEN, &values, &context, &mut payload).unwrap();
    payload
}

/// The same pushes, encoded on one side and as the values they stand for on the other: no parameter differs. What does not
/// shrink travels raw, as these values do by `lossless+lz4`.
#[test]
fn what_is_added_from_the_decoder_is_what_was_decoded() {
    let codecs = [
        "topk:0.2",
        "threshold:1+bitmap",
        "index",
        "f16",
        "bf16",
        "lossless+lz4",
        "onebit",
        "topk:0.3+int8+lz4",
    ];
    let ways = [
        ("bsp", "sgd:lr=0.1", Order::Arrival),
        ("bsp", "sgd:lr=0.1", Order::Ranked),
        ("bsp", "adam:lr=0.1", Order::Arrival),
        ("bsp", "lars:lr=0.1", Order::Arrival),
        ("asp", "momentum:lr=0.1", Order::Arrival),
        ("asp", "lars:lr=0.1", Order::Arrival),
        ("ssp:s=2", "adagrad:lr=0.1", Order::Arrival),
        ("drop:n=2", "sgd:lr=0.1", Order::Arrival),
    ];
    for codec in codecs {
        for (sync, optimizer, order) in ways {
            let policy = Policy::default()
                .with(Axis::Codec, codec)
                .with(Axis::Sync, sync)
                .with(Axis::Optimizer, optimizer)
                .with(Axis::Order, order.to_string());
            let (mut encoded, mut plain) = (Pair::new(policy.clone()), Pair::new(policy));
            let (chain, _) = encoder(codec);
            let mut decoder = Decoder::new(chain);
            let mut encoders: Vec<Encoder> = (0..WORKERS).map(|_| encoder(codec).1).collect();
            let mut prng = Prng::new(7);
            for clock in 0..4 {
                for part in 0..CHUNKS {
                    for worker in 0..WORKERS {
                        let payload = payload(&mut encoders[worker as usize], &mut prng, clock, part);
                        let mut values = vec![0.0f32; LEN];
                        decoder.decode(&payload, &mut values).unwrap();
                        let of_encoded = encoded.take_encoded(worker, clock, part, &payload);
                        let of_plain =
                            plain.take(worker, &header(clock, part), bytemuck::cast_slice(&values));
                        assert_eq!(of_encoded, of_plain, "{codec} {sync} {optimizer}");
                    }
                }
                assert_eq!(encoded.parameters(), plain.parameters(), "{codec} {sync} {optimizer} {clock}");
            }
            assert_ne!(encoded.parameters(), [1.0; 3 * LEN]);
        }
    }
}

/// A payload is refused by the name of its sender, and the round becomes what it would have been without it.
#[test]
fn a_payload_that_is_refused_leaves_no_trace_in_the_sum() {
    for codec in ["topk:0.2", "threshold:1+bitmap", "f16", "lossless+lz4", "onebit", "topk:0.3+int8+lz4"] {
        let policy = policy("bsp").with(Axis::Codec, codec);
        let (mut attacked, mut quiet) = (Pair::new(policy.clone()), Pair::new(policy));
        let (_, mut encoder) = encoder(codec);
        let mut prng = Prng::new(3);
        let mut refused = 0;
        for worker in 0..WORKERS {
            let good: Vec<Vec<u8>> =
                (0..CHUNKS).map(|part| payload(&mut encoder, &mut prng, 0, part)).collect();
            for part in 0..CHUNKS {
                // The first part of an attempt may come as often as it likes.
                for _ in 0..if part == 0 { 500 } else { 0 } {
                    let mut bad = good[0].clone();
                    let at = prng.below(bad.len() as u64) as usize;
                    bad[at] ^= 1 << prng.below(8);
                    bad.truncate(bad.len() - prng.below(3) as usize);
                    if Decoder::new(encoder.codec().clone()).decode(&bad, &mut [0.0; LEN]).is_ok() {
                        continue;
                    }
                    let fault = attacked.take_encoded(worker, 0, 0, &bad).unwrap_err();
                    let (name, message) = (WorkerId(worker).to_string(), &fault.message);
                    assert!(message.contains(&name) && message.contains("nothing was applied"), "{message}");
                    refused += 1;
                }
                let payload = &good[part as usize];
                for pair in [&mut attacked, &mut quiet] {
                    pair.take_encoded(worker, 0, part, payload).unwrap();
                }
            }
        }
        assert!(refused > 100, "{codec}: {refused}");
        assert_eq!(attacked.parameters(), quiet.parameters(), "{codec}");
    }
}

/// Rows of a dense table would pass an aggregator by, and a sum with the same gradient would follow.
#[test]
fn rows_that_a_codec_made_are_refused_by_a_dense_table() {
    let policy = policy("bsp").with(Axis::Codec, "f16");
    let mut pair = Pair::new(policy);
    let (_, mut encoder) = encoder("f16");
    let payload = payload(&mut encoder, &mut Prng::new(1), 0, 0);
    let mut header = header(0, 0);
    header.flags = header.flags.with(Flags::ENCODED).with(Flags::ROWS);
    let fault = pair.take(0, &header, &payload).unwrap_err();
    assert!(fault.message.contains("not one of whole chunks"), "{}", fault.message);
}
