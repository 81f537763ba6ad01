//! Whole tables: what is decided by layer, by however many hands.

use super::{bits, chains, codec, context, norm, samples};
use paramill_core::codec::{
    ChunkInput, Codec, CodecError, Context, Decoder, Encoder, FactorFrames, Factors, LayerRange, Products,
    TableGradient, Written,
};
use paramill_core::hands::{Alone, Hands};
use paramill_core::kernels;
use paramill_core::prng::Prng;
use std::ops::Range;
use std::sync::Arc;

/// A table that is encoded whole: its layers and its chunks.
struct Table {
    layers: Vec<LayerRange>,
    chunks: Vec<Range<usize>>,
    absent: Vec<Range<usize>>,
}

impl Table {
    fn new(layers: &[(usize, usize)], chunk: usize) -> Table {
        let mut len = 0;
        let layers: Vec<LayerRange> = layers
            .iter()
            .map(|&(elements, columns)| {
                len += elements;
                LayerRange { elements: len - elements..len, columns }
            })
            .collect();
        let chunks = (0..len).step_by(chunk).map(|start| start..len.min(start + chunk)).collect();
        Table { layers, chunks, absent: Vec::new() }
    }

    fn len(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.elements.end)
    }

    fn gradient<'a>(&'a self, step: u64, values: &'a [f32]) -> TableGradient<'a> {
        TableGradient {
            values,
            clips_non_finite: false,
            absent: &self.absent,
            layers: &self.layers,
            chunks: &self.chunks,
            factors: None,
            step,
            seed: step + 99,
        }
    }

    fn encode(&self, encoder: &mut Encoder, gradient: &TableGradient<'_>) -> Encoded {
        self.encode_by(&Alone, encoder, gradient)
    }

    fn encode_by(&self, hands: &dyn Hands, encoder: &mut Encoder, gradient: &TableGradient<'_>) -> Encoded {
        let (mut bytes, len) = (Written::default(), self.len());
        let context =
            |chunk: usize| Context { seed: chunk as u64 + gradient.seed, ..context(gradient.step, len) };
        let (factors, chunks) = encoder.encode_table(gradient, context, hands, &mut bytes).unwrap();
        Encoded { bytes: bytes.to_vec(), factors, chunks }
    }

    /// What a receiver gets.
    fn decode(&self, codec: &Arc<Codec>, encoded: &Encoded) -> Vec<f32> {
        let (mut decoder, mut products) = (Decoder::new(codec.clone()), Products::default());
        for range in encoded.factors.iter().flat_map(|layer| &layer.payloads) {
            decoder.take_factors(&encoded.bytes[range.clone()], &self.layers, &mut products).unwrap();
        }
        let mut received = vec![0.0; self.len()];
        for (chunk, range) in self.chunks.iter().zip(&encoded.chunks).filter(|(_, range)| !range.is_empty()) {
            let content =
                decoder.read_chunk(&encoded.bytes[range.clone()], chunk.clone(), &products).unwrap();
            content.copy_to(&mut received[chunk.clone()]);
        }
        received
    }
}

#[derive(PartialEq)]
struct Encoded {
    bytes: Vec<u8>,
    factors: Vec<FactorFrames>,
    chunks: Vec<Range<usize>>,
}

fn normal(len: usize, seed: u64) -> Vec<f32> {
    let mut prng = Prng::new(seed);
    (0..len).map(|_| prng.normal() as f32).collect()
}

#[test]
fn top_k_of_a_layer_picks_exactly_the_layers_largest() {
    // Chunks have parts of several layers, and layers have several chunks.
    let table = Table::new(&[(30_000, 300), (10, 0), (500, 0), (2_001, 0), (9_000, 0)], 1000);
    for (chain, ratio) in
        [("topk:0.01", 0.01), ("topk:0.2", 0.2), ("topk:0.01+index+lz4", 0.01), ("dgc:0.01,momentum=0", 0.01)]
    {
        let codec = codec(chain);
        let mut encoder = Encoder::new(codec.clone(), table.len());
        for step in 0..4 {
            // The last layer has many entries of the same magnitude.
            let mut values = normal(table.len(), step);
            values[32_511..].iter_mut().for_each(|value| *value = value.round());
            let mut input = encoder.residual().to_vec();
            kernels::add(&mut input, &values);
            let received = table.decode(&codec, &table.encode(&mut encoder, &table.gradient(step, &values)));
            let mut expected = vec![0.0; table.len()];
            for LayerRange { elements, .. } in &table.layers {
                let mut places: Vec<usize> = elements.clone().collect();
                places.sort_by(|&a, &b| input[b].abs().total_cmp(&input[a].abs()).then(a.cmp(&b)));
                places.truncate((ratio * elements.len() as f64).ceil() as usize);
                places.iter().for_each(|&at| expected[at] = input[at]);
            }
            assert_eq!(received, expected, "{chain}, step {step}");
        }
    }
}

#[test]
fn what_a_table_sends_and_what_it_keeps_are_what_was_put_in() {
    let table = Table::new(&[(6_000, 100), (700, 0), (20_000, 50)], 1500);
    for chain in chains() {
        let codec = codec(&chain);
        let random = ["qsgd", "terngrad", "dgc", "clip:"].iter().any(|name| chain.contains(name));
        if !codec.keeps_residual() || random {
            continue;
        }
        let mut encoder = Encoder::new(codec.clone(), table.len());
        for step in 0..4 {
            let values = normal(table.len(), step);
            let mut input = encoder.residual().to_vec();
            kernels::add(&mut input, &values);
            let mut sum = table.decode(&codec, &table.encode(&mut encoder, &table.gradient(step, &values)));
            kernels::add(&mut sum, encoder.residual());
            let error = norm(sum.iter().zip(&input).map(|(a, b)| f64::from(a - b)));
            assert!(error < 1e-5 * norm(input.iter().map(|&x| f64::from(x))), "{chain}: {error}");
        }
    }
}

#[test]
fn a_table_stays_within_the_declared_error() {
    let table = Table::new(&[(8_000, 80)], 1000);
    for chain in chains().into_iter().filter(|chain| !chain.contains("clip:") && !chain.contains("randk")) {
        let codec = codec(&chain);
        for values in samples(table.len(), 3) {
            let encoded =
                table.encode(&mut Encoder::new(codec.clone(), table.len()), &table.gradient(0, &values));
            let received = table.decode(&codec, &encoded);
            let bound = codec.bound(table.len());
            let error = norm(values.iter().zip(&received).map(|(a, b)| f64::from(*a) - f64::from(*b)));
            let allowed = bound.of_norm * kernels::squared_norm(&values).sqrt()
                + bound.absolute * (table.len() as f64).sqrt();
            assert!(error <= allowed * (1.0 + 1e-6), "{chain}: {error} > {allowed}");
            assert!(encoded.bytes.len() <= 4 * table.len() + 8 * table.chunks.len() + 24, "{chain}");
        }
    }
}

/// The matrix of a layer, whatever its chunks: its rows are longer than a chunk here.
#[test]
fn powersgd_finds_the_rank_of_a_layer_and_sends_its_factors_once() {
    let (rows, columns) = (60, 1700);
    let table = Table::new(&[(100, 0), (rows * columns, columns), (77, 0)], 1000);
    let cell = |at: usize| {
        let (row, column) = ((at / columns) as f32, (at % columns) as f32);
        row.sin() * column.cos() + 0.5 * row.cos() * (column * 0.3).sin()
    };
    let mut values = vec![0.25; 100];
    values.extend((0..rows * columns).map(cell));
    values.extend([0.5; 77]);
    for (chain, part, near) in [("powersgd:rank=2", 20, 1e-3), ("powersgd:rank=2+bf16", 40, 2e-2)] {
        let codec = codec(chain);
        let (mut encoder, mut sum) = (Encoder::new(codec.clone(), table.len()), vec![0.0; table.len()]);
        for step in 0..3 {
            let encoded = table.encode(&mut encoder, &table.gradient(step, &values));
            assert!(encoded.bytes.len() * part < 4 * table.len(), "{chain}: {} bytes", encoded.bytes.len());
            kernels::add(&mut sum, &table.decode(&codec, &encoded));
        }
        let error = norm(sum.iter().zip(&values).map(|(a, b)| f64::from(a - 3.0 * b)));
        assert!(error < near * 3.0 * norm(values.iter().map(|&x| f64::from(x))), "{chain}: {error}");
    }
}

#[test]
fn factors_of_a_large_layer_are_at_least_twenty_times_shorter() {
    let (rows, columns, rank) = (4096, 9216, 128);
    let table = Table::new(&[(rows * columns, columns)], 8192);
    // What is sent depends on the factors alone.
    let (values, u, v) = (vec![0.0; rows * columns], normal(rows * rank, 1), normal(rank * columns, 2));
    let factors = Some(Factors { rank: rank as u32, u: &u, v: &v });
    let codec = codec("factors");
    let gradient = TableGradient { factors, ..table.gradient(0, &values) };
    let encoded = table.encode(&mut Encoder::new(codec.clone(), table.len()), &gradient);
    let frames =
        encoded.chunks.len() + encoded.factors.iter().map(|layer| layer.payloads.len()).sum::<usize>();
    let (sent, plain) = (encoded.bytes.len() + 64 * frames, 4 * table.len() + 64 * table.chunks.len());
    assert!(sent * 20 < plain, "{sent} of {plain} bytes, with their headers");
    let mut decoder = Decoder::new(codec);
    let mut products = Products::default();
    for range in &encoded.factors[0].payloads {
        decoder.take_factors(&encoded.bytes[range.clone()], &table.layers, &mut products).unwrap();
    }
    // A chunk in the middle, which has parts of two rows.
    let number = 2050;
    let payload = &encoded.bytes[encoded.chunks[number].clone()];
    let chunk = decoder.read_chunk(payload, table.chunks[number].clone(), &products).unwrap().to_vec();
    for (at, found) in table.chunks[number].clone().zip(chunk).step_by(97) {
        let (row, column) = (at / columns, at % columns);
        let expected: f32 = (0..rank).map(|k| u[row * rank + k] * v[k * columns + column]).sum();
        assert!((found - expected).abs() < 1e-4, "{found} for {expected}");
    }
}

/// The factors that a layer offers are not what is sent, where something else is added to them or taken away.
#[test]
fn factors_stand_aside_for_what_they_do_not_have() {
    let table = Table::new(&[(400, 20)], 100);
    let (u, v) = (normal(20, 1), normal(20, 2));
    let values: Vec<f32> = (0..400).map(|at| u[at / 20] * v[at % 20]).collect();
    let factors = Some(Factors { rank: 1, u: &u, v: &v });
    let gradient = TableGradient { factors, ..table.gradient(0, &values) };
    let has_factors = |chain: &str, left: f32| {
        let mut encoder = Encoder::new(codec(chain), 400);
        if left != 0.0 {
            encoder.put_back_values(7, &[left]);
        }
        let encoded = table.encode(&mut encoder, &gradient);
        let received = table.decode(encoder.codec(), &encoded);
        assert!((received[7] - values[7] - left).abs() < 0.01 || chain.contains("clip"), "{chain}");
        !encoded.factors.is_empty()
    };
    assert!(has_factors("factors", 0.0) && has_factors("factors+bf16+lz4", 0.0));
    assert!(!has_factors("factors", 4.0) && !has_factors("clip:0.1+factors", 0.0));
    assert!(!has_factors("min-size:401+factors", 0.0) && !has_factors("warmup:1+factors", 0.0));
}

#[test]
fn what_a_table_keeps_of_absent_ranges_is_held() {
    let mut table = Table::new(&[(3_000, 30), (500, 0)], 400);
    let (before, mut values) = (normal(3_500, 1), normal(3_500, 2));
    for chain in chains() {
        let codec = codec(&chain);
        let mut encoder = Encoder::new(codec.clone(), table.len());
        table.absent.clear();
        table.encode(&mut encoder, &table.gradient(3, &before));
        let kept = encoder.residual().to_vec();
        table.absent = vec![20..90, 400..800, 2_999..3_100];
        // Whatever stands there is not looked at.
        values[20..90].fill(1e6);
        let encoded = table.encode(&mut encoder, &table.gradient(4, &values));
        assert!(encoded.chunks[1].is_empty(), "{chain}: a chunk that is absent altogether");
        for range in table.absent.iter().filter(|_| !kept.is_empty()) {
            assert_eq!(bits(&encoder.residual()[range.clone()]), bits(&kept[range.clone()]), "{chain}");
        }
        let received = table.decode(&codec, &encoded);
        assert!(received.iter().all(|value| value.abs() < 1e3), "{chain}: what is absent was chosen");
    }
}

/// So many threads, for which little is worth sharing.
struct Threads(usize);

impl Hands for Threads {
    fn count(&self) -> usize {
        self.0
    }

    fn worth(&self) -> usize {
        1000
    }

    fn share(&self, pieces: usize, work: &(dyn Fn(usize) + Sync)) {
        let count = self.0;
        std::thread::scope(|scope| {
            for first in 0..count {
                // From the last to the first, so that nothing is in order by chance.
                scope.spawn(move || (first..pieces).step_by(count).rev().for_each(work));
            }
        });
    }
}

/// Layers that are shared, and small ones that are shared out. The second one has many entries of the same magnitude.
#[test]
fn many_hands_make_what_one_makes() {
    let table = Table::new(&[(90_000, 300), (40_000, 0), (700, 0), (900, 30), (10, 0), (1_500, 0)], 1_900);
    for chain in chains() {
        let codec = codec(&chain);
        let mut alone = Encoder::new(codec.clone(), table.len());
        let mut others: Vec<_> =
            [1, 2, 7].map(|count| (Threads(count), Encoder::new(codec.clone(), table.len()))).into();
        for step in 0..2 {
            let mut values = normal(table.len(), step);
            values[90_000..130_000].iter_mut().for_each(|value| *value = value.round());
            let gradient = table.gradient(step, &values);
            let expected = table.encode(&mut alone, &gradient);
            for (hands, encoder) in &mut others {
                let found = table.encode_by(hands, encoder, &gradient);
                assert!(found == expected, "{chain}, {} hands, step {step}", hands.0);
                assert!(bits(encoder.residual()) == bits(alone.residual()), "{chain}, {} hands", hands.0);
            }
        }
    }
}

#[test]
fn many_hands_make_what_one_makes_of_what_an_application_prepared() {
    let table = Table::new(&[(90_000, 0)], 1_900);
    let absent = [3_800..5_700, 89_999..90_000];
    let places: Vec<u32> = (0..90_000).filter(|at| at % 7 == 3 || at % 1000 < 20).collect();
    let values = normal(places.len(), 4);
    let mut whole = vec![0.0; 90_000];
    places.iter().zip(&values).for_each(|(&at, &value)| whole[at as usize] = value);
    for chain in ["topk:0.01", "topk:0.01+f16", "topk:0.01+qsgd:levels=4", "threshold:0.5+bitmap+lz4"] {
        let encode = |hands: &dyn Hands, by_place: bool| {
            let input = |number: usize| {
                let chunk = table.chunks[number].clone();
                if !by_place {
                    return ChunkInput::Chosen(&whole[chunk]);
                }
                let end = |at: usize| places.partition_point(|&place| (place as usize) < at);
                let here = end(chunk.start)..end(chunk.end);
                ChunkInput::Places(&places[here.clone()], &values[here])
            };
            let context = |number: usize| Context { seed: number as u64, ..context(0, 90_000) };
            let (mut encoder, mut bytes) = (Encoder::new(codec(chain), 90_000), Written::default());
            let ranges = encoder.encode_prepared(&table.chunks, &absent, input, context, hands, &mut bytes);
            (ranges.unwrap(), bytes.to_vec())
        };
        let expected = encode(&Alone, true);
        assert!(expected.0[2].is_empty() && !expected.0[3].is_empty(), "{chain}");
        for (count, by_place) in [(1, true), (2, true), (7, true), (1, false), (7, false)] {
            assert!(encode(&Threads(count), by_place) == expected, "{chain}, {count} hands");
        }
        let encoded = Encoded { bytes: expected.1, factors: Vec::new(), chunks: expected.0 };
        let received = table.decode(&codec(chain), &encoded);
        assert!(received[absent[0].clone()].iter().all(|&value| value == 0.0), "{chain}");
        assert!(chain != "topk:0.01" || received[5_700..] == whole[5_700..], "{chain}");
    }
}

#[test]
fn an_overflow_of_a_layer_changes_nothing() {
    let table = Table::new(&[(2_000, 20)], 500);
    for chain in ["topk:0.01", "topk:0.5", "powersgd", "dgc:0.01"] {
        let mut encoder = Encoder::new(codec(chain), table.len());
        let mut values = normal(table.len(), 1);
        values[1_990] = f32::MAX;
        encoder.put_back_values(1_990, &[f32::MAX]);
        let (before, mut bytes) = (bits(encoder.residual()), Written::default());
        let (gradient, context) = (table.gradient(1, &values), |_| context(1, table.len()));
        let result = encoder.encode_table(&gradient, context, &Threads(3), &mut bytes);
        assert_eq!(result.map(|_| ()), Err(CodecError::Overflow), "{chain}");
        assert_eq!(bits(encoder.residual()), before, "{chain}");
    }
}

/// Nothing is known of a chunk that overflows before the others are encoded.
#[test]
fn an_overflow_of_a_chunk_leaves_what_is_kept_of_the_others() {
    let absent = [30..70, 600..800, 1_000..1_500];
    let table = Table { absent: absent.to_vec(), ..Table::new(&[(1_200, 20), (800, 1)], 500) };
    for chain in ["threshold:0.5", "onebit", "ef+int8", "randk:0.1,residual=true", "min-size:4096+dgc:0.1"] {
        for hands in [1, 3] {
            let mut encoder = Encoder::new(codec(chain), table.len());
            (0..3).for_each(|step| {
                table.encode(&mut encoder, &table.gradient(step, &normal(table.len(), step + 5)));
            });
            let mut values = normal(table.len(), 1);
            values[1_990] = 3e38;
            encoder.put_back_values(1_990, &[3e38]);
            let (before, mut bytes) = (encoder.residual().to_vec(), Written::default());
            let (gradient, context) = (table.gradient(3, &values), |_| context(3, table.len()));
            let result = encoder.encode_table(&gradient, context, &Threads(hands), &mut bytes);
            assert_eq!(result.map(|_| ()), Err(CodecError::Overflow), "{chain}");
            for (at, (&kept, &was)) in encoder.residual().iter().zip(&before).enumerate() {
                let is_absent = absent.iter().any(|range| range.contains(&at));
                let tolerance = if is_absent { 0.0 } else { 1e-5 * (1.0 + was.abs() + values[at].abs()) };
                assert!((kept - was).abs() <= tolerance, "{chain}: {kept} for {was} at {at}");
            }
        }
    }
}
