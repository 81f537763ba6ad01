//! What every registered codec, and every chain of them, must keep. A new one is tested by being registered.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use paramill_core::absence::Absent;
use paramill_core::codec::{
    ChunkInput, Codec, CodecError, Context, Decoder, Encoder, FactorFrames, Factors, Kind, LayerRange,
    Products, Stage, TableGradient, Written,
};
use paramill_core::hands::{Alone, Hands};
use paramill_core::kernels;
use paramill_core::prng::Prng;
use paramill_core::registry::{Axis, Registry};
use paramill_core::spec::Spec;
use std::ops::Range;
use std::sync::Arc;

fn axis() -> Axis<Stage> {
    Registry::builtin().codec
}

fn codec(text: &str) -> Arc<Codec> {
    Arc::new(Codec::parse(&axis(), text).unwrap_or_else(|error| panic!("{text}: {error}")))
}

/// Names of one kind of stage.
fn examples_of(kind: Kind) -> Vec<&'static str> {
    let axis = axis();
    let one = |example: &'static str| -> Option<&'static str> {
        let spec = Spec::parse(example).ok().filter(|_| !example.contains('+'))?;
        (axis.build(&spec).unwrap().kind() == kind).then_some(example)
    };
    axis.entries().iter().filter_map(|entry| one(entry.example)).collect()
}

/// The examples of the registry, and every sparsifier and low-rank codec with every quantiser.
fn chains() -> Vec<String> {
    let mut chains: Vec<String> = axis().entries().iter().map(|entry| entry.example.to_owned()).collect();
    for kind in [Kind::Sparsifier, Kind::LowRank] {
        for first in examples_of(kind) {
            for quantiser in examples_of(Kind::Quantiser) {
                let text = format!("{first}+{quantiser}");
                if Codec::parse(&axis(), &text).is_ok() {
                    chains.push(text);
                }
            }
        }
    }
    chains.extend(
        [
            "topk:0.1,sample=0.5+f16+lz4",
            "topk:0.1,residual=false",
            "randk:0.1,residual=true+onebit",
            "randk:0.2+qsgd:levels=2",
            "terngrad:clip=0",
            "qsgd:levels=1,norm=l2",
            "qsgd:levels=100,bucket=64+zstd",
            "ef+f16",
            "ef+bf16+snappy",
            "threshold:0.5+bitmap+int8",
            "min-size:1000000+topk:0.01",
            "index+lz4",
            "lossless+zstd:3",
            "clip:value=0.5+clip:sigma=2+dvf:delta=0.1+bitmap+snappy",
        ]
        .map(String::from)
        .into_iter()
        .filter(|text| Codec::parse(&axis(), text).is_ok()),
    );
    chains
}

const LENGTHS: [usize; 9] = [0, 1, 2, 63, 64, 65, 1000, 8192, 8192 + 13];

/// Kinds of values that gradients have.
fn samples(len: usize, seed: u64) -> Vec<Vec<f32>> {
    let mut prng = Prng::new(seed);
    let normal: Vec<f32> = (0..len).map(|_| prng.normal() as f32).collect();
    let sparse = normal.iter().map(|&x| if prng.chance(0.8) { 0.0 } else { x }).collect();
    let long_tailed = normal.iter().map(|&x| x.powi(5)).collect();
    let tiny = normal.iter().map(|&x| x * 1e-40).collect();
    let huge = normal.iter().map(|&x| (x * 1e4).clamp(-6e4, 6e4)).collect();
    let zeros = (0..len).map(|at| if at % 2 == 0 { 0.0 } else { -0.0 }).collect();
    vec![normal, sparse, long_tailed, tiny, huge, zeros, vec![0.25; len]]
}

fn context(step: u64, len: usize) -> Context<'static> {
    Context { step, seed: step + 99, layer_elements: len as u64, ..Context::default() }
}

fn encode(encoder: &mut Encoder, step: u64, values: &[f32]) -> Vec<u8> {
    let mut payload = Vec::new();
    encoder.encode(0, values, &context(step, values.len()), &mut payload).unwrap();
    payload
}

fn norm(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_entry_is_described_and_its_example_has_it() {
    for entry in axis().entries() {
        assert!(entry.about.ends_with('.'), "{}: {}", entry.name, entry.about);
        let names: Vec<String> =
            entry.example.split('+').map(|stage| Spec::parse(stage).unwrap().name).collect();
        assert!(names.iter().any(|name| name == entry.name), "{}", entry.example);
        assert_eq!(codec(entry.example).to_string(), entry.example);
    }
}

#[test]
fn the_text_form_comes_back() {
    for chain in chains() {
        assert_eq!(codec(&chain).to_string(), chain);
    }
}

#[test]
fn an_unknown_parameter_is_refused_and_the_known_ones_are_listed() {
    let axis = axis();
    for entry in axis.entries() {
        let error = (entry.build)(&Spec::parse(&format!("{}:colour=blue", entry.name)).unwrap());
        let error = error.err().unwrap_or_else(|| panic!("{} takes a colour", entry.name)).to_string();
        assert!(error.contains("`colour`"), "{error}");
        for param in entry.params {
            assert!(error.contains(param.name), "{error} does not list {}", param.name);
        }
    }
}

#[test]
fn declared_defaults_are_the_real_ones() {
    let axis = axis();
    for entry in axis.entries() {
        let example = entry.example.split('+').map(|stage| Spec::parse(stage).unwrap());
        let given = example.into_iter().find(|spec| spec.name == entry.name).unwrap();
        let required: Vec<(String, String)> = entry
            .params
            .iter()
            .filter(|param| param.default.is_none())
            .map(|param| (param.name.to_owned(), given.params[0].1.clone()))
            .collect();
        let mut explicit = required.clone();
        explicit.extend(
            entry.params.iter().filter_map(|param| Some((param.name.to_owned(), param.default?.to_owned()))),
        );
        let build = |params| axis.build(&Spec { name: entry.name.into(), params });
        assert_eq!(format!("{:?}", build(required)), format!("{:?}", build(explicit)));
    }
}

#[test]
fn chains_that_make_no_sense_are_refused_with_the_reason() {
    for (text, reason) in [
        ("topk:0.01+dvf:delta=1e-3", "has a sparsifier already, `topk`"),
        ("f16+int8", "has a quantiser already"),
        ("lz4+zstd", "has a byte compressor already"),
        ("lz4+topk:0.01", "write `topk` to the left of `lz4`"),
        ("f16+topk:0.01", "write `topk` to the left of `f16`"),
        ("dvf:delta=1e-3,residual=false", "would be lost for good"),
        ("lossless+onebit", "`onebit` loses something"),
        ("lossless+topk:0.01+lz4", "`topk` loses something"),
        ("lossless+clip:1+lz4", "`clip` changes values"),
        ("ef+lz4", "there is no error"),
        ("ef+qsgd", "a residual of it would grow"),
        ("ef+terngrad", "a residual of it would grow"),
        ("ef+randk:0.1", "say `residual=true`"),
        ("topk:0.01,residual=false+onebit", "needs a residual"),
        ("topk:0.01+powersgd", "leave out `topk`"),
        ("powersgd+bitmap", "leave out `bitmap`"),
        ("powersgd+onebit", "take f16 or bf16"),
        ("topk:0", "expected 0 < ratio <= 1"),
        ("topk:1.5", "expected 0 < ratio <= 1"),
        ("topk:0.1,sample=0", "expected 0 < sample <= 1"),
        ("topk:0.1,select=sampled", "unknown field `select`"),
        ("threshold:-1", "expected value > 0"),
        ("dvf:delta=nan", "expected delta > 0"),
        ("qsgd:levels=0", "expected 1 to 127"),
        ("qsgd:bucket=7", "a multiple of 8"),
        ("zstd:99", "expected 1 to 19"),
        ("topk", "missing field `ratio`"),
        ("topk:0.1,ratio=0.2", "`ratio` is given twice"),
        ("topq:0.01", "unknown codec `topq`; known: f16, bf16"),
        ("", "a component name is expected"),
        ("f16+", "a component name is expected"),
    ] {
        let error =
            Codec::parse(&axis(), text).err().unwrap_or_else(|| panic!("{text} is taken")).to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
}

#[test]
fn a_round_trip_stays_within_the_declared_error() {
    for chain in chains().into_iter().filter(|chain| !chain.contains("clip:")) {
        let codec = codec(&chain);
        let mut decoder = Decoder::new(codec.clone());
        for len in LENGTHS {
            for values in samples(len, len as u64) {
                let payload = encode(&mut Encoder::new(codec.clone(), len), 0, &values);
                assert!(payload.len() <= codec.max_bytes(len), "{chain}: {} bytes for {len}", payload.len());
                let mut received = vec![f32::NAN; len];
                decoder.decode(&payload, &mut received).unwrap_or_else(|error| panic!("{chain}: {error}"));
                if codec.is_lossless() {
                    assert_eq!(bits(&received), bits(&values), "{chain}");
                }
                let bound = codec.bound(len);
                let error = norm(values.iter().zip(&received).map(|(a, b)| f64::from(*a) - f64::from(*b)));
                let allowed = bound.of_norm * kernels::squared_norm(&values).sqrt()
                    + bound.absolute * (len as f64).sqrt();
                assert!(error <= allowed * (1.0 + 1e-6), "{chain}, {len}: {error} > {allowed}");
            }
        }
    }
}

#[test]
fn small_tables_and_first_steps_travel_as_they_are() {
    let values = samples(64, 1).remove(0);
    let is_exact = |chain: &str, step: u64, layer_elements: u64| {
        let (codec, context) = (codec(chain), Context { layer_elements, ..context(step, values.len()) });
        let (mut payload, mut received) = (Vec::new(), vec![0.0; values.len()]);
        Encoder::new(codec.clone(), values.len()).encode(0, &values, &context, &mut payload).unwrap();
        Decoder::new(codec).decode(&payload, &mut received).unwrap();
        received == values
    };
    assert_eq!([99, 100].map(|elements| is_exact("min-size:100+onebit", 0, elements)), [true, false]);
    assert_eq!([2, 3].map(|step| is_exact("warmup:3+topk:0.1", step, 64)), [true, false]);
    assert!(!is_exact("topk:0.1", 0, 64));
}

/// A declared error that is wider than the codec's own would hide a worse codec from the test above.
#[test]
fn declared_errors_are_no_wider_than_the_theory() {
    for (chain, len, of_norm, absolute) in [
        // Half a unit in the last place.
        ("f16", 10_000, 1.0 / 2048.0, 0.0),
        ("bf16", 10_000, 1.0 / 256.0, 0.0),
        // Half a step of 1/127 of the norm for each value.
        ("int8", 10_000, 100.0 / 254.0, 0.0),
        // A step of the norm of a bucket.
        ("qsgd:levels=100,bucket=64", 10_000, 0.08, 0.0),
        ("qsgd:levels=100,bucket=64", 16, 0.04, 0.0),
        ("terngrad", 10_000, 100.0, 0.0),
        // A projection is no longer than what it projects.
        ("onebit", 10_000, 1.0, 0.0),
        ("powersgd", 10_000, 1.0, 0.0),
        // What is kept has at most its share of the squares.
        ("topk:0.19", 10_000, 0.9, 0.0),
        ("topk:0.19,sample=0.1", 10_000, 1.0, 0.0),
        ("dgc:0.01", 10_000, 1.0, 0.0),
        // One in ten travels, ten times as large.
        ("randk:0.1", 10_000, 9.0, 0.0),
        ("randk:0.75", 10_000, 1.0, 0.0),
        ("threshold:0.5", 10_000, 0.0, 0.5),
        ("dvf:delta=0.25", 10_000, 0.0, 0.25),
        ("topk:0.19+bf16", 10_000, 0.9 + 1.0 / 256.0, 0.0),
        ("randk:0.1+bf16", 10_000, 9.0 + 10.0 / 256.0, 0.0),
        ("threshold:0.5+bf16", 10_000, 1.0 / 256.0, 0.5),
        ("lz4", 10_000, 0.0, 0.0),
    ] {
        let bound = codec(chain).bound(len);
        let is_near = |found: f64, expected: f64| (found - expected).abs() <= 0.003 * expected + 1e-7;
        assert!(is_near(bound.of_norm, of_norm) && is_near(bound.absolute, absolute), "{chain}: {bound:?}");
    }
}

#[test]
fn decode_add_is_decode_and_add() {
    for chain in chains() {
        let codec = codec(&chain);
        let mut decoder = Decoder::new(codec.clone());
        for len in LENGTHS {
            let start: Vec<f32> = (0..len).map(|at| at as f32 * 0.01 - 3.0).collect();
            for values in samples(len, 7 + len as u64) {
                let payload = encode(&mut Encoder::new(codec.clone(), len), 3, &values);
                let mut received = vec![0.0; len];
                decoder.decode(&payload, &mut received).unwrap();
                let mut expected = start.clone();
                kernels::add(&mut expected, &received);
                let mut sum = start.clone();
                decoder.decode_add(&payload, &mut sum).unwrap();
                assert_eq!(bits(&sum), bits(&expected), "{chain}, {len}");
            }
        }
    }
}

/// Sparsifiers lose nothing at all: an entry is either sent as it is or kept as it is.
#[test]
fn what_is_sent_and_what_is_kept_are_what_was_put_in() {
    for chain in chains() {
        let codec = codec(&chain);
        if !codec.keeps_residual() || chain.contains("dgc") || chain.contains("clip:") {
            continue;
        }
        let exact = !examples_of(Kind::Quantiser).iter().any(|name| chain.contains(name))
            && !chain.contains("powersgd");
        let (len, mut prng) = (8192 + 13, Prng::new(3));
        let (mut encoder, mut decoder) = (Encoder::new(codec.clone(), len), Decoder::new(codec.clone()));
        for step in 0..5 {
            let mut input: Vec<f32> = (0..len).map(|_| prng.normal() as f32).collect();
            let before = encoder.residual().to_vec();
            let payload = encode(&mut encoder, step, &input);
            kernels::add(&mut input, &before);
            let mut sum = encoder.residual().to_vec();
            decoder.decode_add(&payload, &mut sum).unwrap();
            let random = chain.contains("qsgd") || chain.contains("terngrad");
            match exact {
                true => assert_eq!(sum, input, "{chain}"),
                false if random => {}
                false => {
                    let error = norm(sum.iter().zip(&input).map(|(a, b)| f64::from(a - b)));
                    assert!(error < 1e-5 * norm(input.iter().map(|&x| f64::from(x))), "{chain}: {error}");
                }
            }
        }
    }
}

/// A residual is not a drain: what goes in comes out at last.
#[test]
fn residuals_stay_bounded() {
    for chain in chains() {
        let codec = codec(&chain);
        let unbounded = ["qsgd", "terngrad", "randk", "clip:"].iter().any(|name| chain.contains(name));
        if !codec.keeps_residual() || unbounded {
            continue;
        }
        let (len, mut prng) = (2048, Prng::new(17));
        let mut encoder = Encoder::new(codec.clone(), len);
        let mut largest: f64 = 0.0;
        for step in 0..400 {
            let input: Vec<f32> = (0..len).map(|_| prng.normal() as f32).collect();
            encode(&mut encoder, step, &input);
            largest = largest.max(norm(encoder.residual().iter().map(|&x| f64::from(x))));
        }
        // Where one entry in a hundred travels, about a hundred steps' worth of the others waits.
        assert!(largest < 150.0 * 45.0, "{chain}: {largest}");
    }
}

/// With a fixed seed: the mean of many draws, against five times its standard error.
#[test]
fn the_mean_of_random_choices_is_what_was_put_in() {
    let random: Vec<String> = chains().into_iter().filter(|chain| codec(chain).is_unbiased()).collect();
    for name in ["qsgd", "terngrad", "randk"] {
        assert!(random.iter().any(|chain| chain.contains(name)), "{name} is not tested: {random:?}");
    }
    for chain in random {
        let codec = codec(&chain);
        let (len, draws) = (200, 4000);
        let mut prng = Prng::new(23);
        let values: Vec<f32> = (0..len).map(|_| prng.normal() as f32).collect();
        let (mut encoder, mut decoder) = (Encoder::new(codec.clone(), len), Decoder::new(codec.clone()));
        let (mut sums, mut squares) = (vec![0.0f64; len], vec![0.0f64; len]);
        for step in 0..draws {
            let mut received = vec![0.0; len];
            decoder.decode(&encode(&mut encoder, step, &values), &mut received).unwrap();
            for (at, value) in received.iter().enumerate() {
                sums[at] += f64::from(*value);
                squares[at] += f64::from(*value).powi(2);
            }
        }
        let draws = draws as f64;
        let variances: Vec<f64> =
            (0..len).map(|at| (squares[at] / draws - (sums[at] / draws).powi(2)).max(0.0)).collect();
        // A small value is rounded up too rarely to tell its deviation; that of the largest bounds it.
        let largest = variances.iter().copied().fold(0.0, f64::max);
        let allowed = 5.0 * (largest / draws).sqrt() + 1e-5;
        let mut towards_zero = 0.0;
        for at in 0..len {
            let (mean, value) = (sums[at] / draws, f64::from(values[at]));
            assert!((mean - value).abs() <= allowed, "{chain}: {mean} for {value}");
            towards_zero += (value - mean) * value.signum();
        }
        // Nor do they all lean to one side.
        let allowed = 5.0 * (variances.iter().sum::<f64>() / draws).sqrt() + 1e-3;
        assert!(towards_zero.abs() <= allowed, "{chain}: {towards_zero} in all");
    }
}

#[test]
fn nan_and_infinity_are_refused_and_nothing_changes() {
    for chain in chains() {
        let codec = codec(&chain);
        let mut encoder = Encoder::new(codec.clone(), 100);
        encode(&mut encoder, 0, &[0.3; 100]);
        let before = encoder.residual().to_vec();
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![0.1; 100];
            values[57] = odd;
            let mut payload = vec![1, 2, 3];
            let error = encoder.encode(0, &values, &context(1, 100), &mut payload).unwrap_err();
            assert_eq!(error, CodecError::NonFinite, "{chain}");
            assert_eq!((payload.len(), encoder.residual()), (3, &before[..]), "{chain}");
        }
    }
}

/// A caller that chooses entries by itself, on a device say, is read like the chain's own sparsifier.
#[test]
fn entries_that_the_caller_chose_are_read_back() {
    for chain in chains() {
        let codec = codec(&chain);
        let mut encoder = Encoder::new(codec.clone(), 0);
        for len in [1, 64, 3000] {
            let values: Vec<f32> = (0..len).map(|at| if at % 9 == 0 { 0.5 } else { 0.0 }).collect();
            let chosen = || (0..len).step_by(3).map(|at| (at, values[at]));
            let mut payload = Vec::new();
            encoder.encode_chosen(len, chosen(), &context(0, len), &mut payload).unwrap();
            assert!(payload.len() <= codec.max_bytes(len), "{chain}: {} bytes for {len}", payload.len());
            let mut received = vec![0.0; len];
            Decoder::new(codec.clone()).decode(&payload, &mut received).unwrap();
            let quantisers = examples_of(Kind::Quantiser).into_iter();
            let mut names = quantisers.map(|example| example.split(':').next().unwrap());
            if !names.any(|name| chain.contains(name)) {
                assert_eq!(bits(&received), bits(&values), "{chain}");
            }
        }
        let mut refuse = |chosen: [(usize, f32); 2]| {
            let mut payload = vec![1];
            let error = encoder.encode_chosen(8, chosen.into_iter(), &context(0, 8), &mut payload);
            assert_eq!(payload, [1], "{chain}");
            error.unwrap_err()
        };
        assert!(matches!(refuse([(3, 1.0), (3, 1.0)]), CodecError::Input(_)));
        assert!(matches!(refuse([(3, 1.0), (8, 1.0)]), CodecError::Input(_)));
        assert_eq!(refuse([(3, 1.0), (4, f32::NAN)]), CodecError::NonFinite);
    }
}

/// Eight bytes of prefix, and what docs/codecs.md says of the body.
#[test]
fn payloads_are_as_short_as_their_layout() {
    let values = samples(1000, 1).remove(0);
    for (chain, bytes) in [
        ("f16", 8 + 2 * 1000),
        ("int8", 8 + 4 + 1000),
        ("topk:0.01", 8 + 10 * (2 + 4)),
        ("topk:0.01+f16", 8 + 10 * (2 + 2)),
        ("topk:0.01+bitmap", 8 + 125 + 10 * 4),
        ("topk:0.01+dense", 8 + 4 * 1000),
        ("topk:0.5", 8 + 125 + 500 * 4),
        ("topk:0.1+hybrid", 8 + 100 * (2 + 4)),
        ("topk:0.2+hybrid", 8 + 4 * 1000),
        ("randk:0.01", 8 + 10 * (2 + 4)),
    ] {
        let payload = encode(&mut Encoder::new(codec(chain), values.len()), 0, &values);
        assert_eq!(payload.len(), bytes, "{chain}");
        // The same entries, chosen by the caller.
        let mut sent = vec![0.0; values.len()];
        Decoder::new(codec(chain)).decode(&payload, &mut sent).unwrap();
        if chain.starts_with("topk") {
            let chosen = sent.iter().copied().enumerate().filter(|(_, value)| *value != 0.0);
            let mut again = Vec::new();
            let mut encoder = Encoder::new(codec(chain), 0);
            encoder.encode_chosen(values.len(), chosen, &context(0, values.len()), &mut again).unwrap();
            assert_eq!(again, payload, "{chain}");
        }
    }
}

/// 16-bit places do not reach the end of a longer stretch.
#[test]
fn places_that_are_too_short_for_their_stretch_are_refused() {
    let (codec, len) = (codec("topk:0.00001+index"), 1 << 16);
    let mut values = vec![0.0; len];
    values[7] = 1.0;
    let payload = encode(&mut Encoder::new(codec.clone(), len), 0, &values);
    assert_eq!(payload.len(), 8 + 2 + 4);
    let decode = |len: usize| Decoder::new(codec.clone()).decode(&payload, &mut vec![0.0; len]);
    assert_eq!(decode(len), Ok(()));
    assert!(decode(len + 1).is_err());
    values.push(0.0);
    assert_eq!(encode(&mut Encoder::new(codec, len + 1), 0, &values).len(), 8 + 4 + 4);
}

/// Halves that the caller made are those that the chain would have made.
#[test]
fn values_that_the_caller_quantised_are_read_back() {
    for chain in ["f16", "bf16", "ef+f16", "f16+lz4", "bf16+dense+zstd"] {
        let (codec, values) = (codec(chain), samples(500, 1).remove(0));
        let own = encode(&mut Encoder::new(codec.clone(), values.len()), 0, &values);
        let plain = chain.split('+').find(|stage| stage.ends_with("f16")).unwrap();
        let halves = encode(&mut Encoder::new(self::codec(plain), values.len()), 0, &values);
        let (mut encoder, mut payload) = (Encoder::new(codec, 0), Vec::new());
        encoder.encode_quantised(values.len(), &halves[8..], &mut payload).unwrap();
        assert_eq!(payload, own, "{chain}");
        assert!(encoder.encode_quantised(values.len(), &halves[9..], &mut payload).is_err());
    }
    let mut encoder = Encoder::new(codec("topk:0.1+f16"), 0);
    assert!(matches!(encoder.encode_quantised(2, &[0; 4], &mut Vec::new()), Err(CodecError::Input(_))));
    let mut encoder = Encoder::new(codec("f16"), 0);
    assert_eq!(encoder.encode_quantised(1, &[0, 0x7c], &mut Vec::new()), Err(CodecError::NonFinite));
}

#[test]
fn a_sum_that_overflows_is_refused_and_nothing_changes() {
    let mut encoder = Encoder::new(codec("topk:0.01"), 100);
    let values = vec![f32::MAX; 100];
    encode(&mut encoder, 0, &values);
    let before = encoder.residual().to_vec();
    let mut payload = Vec::new();
    let error = encoder.encode(0, &values, &context(1, 100), &mut payload).unwrap_err();
    assert_eq!((error, payload.len()), (CodecError::Overflow, 0));
    assert_eq!(encoder.residual(), before);
}

/// The largest values that there are: whatever is sent of them can be read.
#[test]
fn extreme_values_are_readable() {
    for chain in chains() {
        let codec = codec(&chain);
        for values in [
            [f32::MAX, -f32::MAX].repeat(4096),
            [f32::MIN_POSITIVE, -1e-45, 1e-45, 0.0].repeat(2048),
            [f32::MAX, 1e-45, 0.0].repeat(3000),
        ] {
            let payload = encode(&mut Encoder::new(codec.clone(), values.len()), 0, &values);
            let mut received = vec![0.0; values.len()];
            Decoder::new(codec.clone())
                .decode(&payload, &mut received)
                .unwrap_or_else(|error| panic!("{chain}: {error}"));
        }
    }
}

#[test]
fn a_dense_container_has_zeros_for_what_a_sparsifier_left_out() {
    let values = &samples(8192, 5)[0];
    let large = |value: &f32| if value.abs() > 2.0 { *value } else { 0.0 };
    let kept: Vec<f32> = values.iter().map(large).collect();
    for text in ["threshold:2+dense", "threshold:2+dense+lz4"] {
        let codec = codec(text);
        let payload = encode(&mut Encoder::new(codec.clone(), values.len()), 0, values);
        let mut decoded = vec![0.0; values.len()];
        Decoder::new(codec).decode(&payload, &mut decoded).unwrap();
        assert_eq!(bits(&decoded), bits(&kept), "{text}");
        assert!(!text.ends_with("lz4") || payload.len() < values.len(), "{text}: {} bytes", payload.len());
    }
}

#[test]
fn the_same_values_give_the_same_bytes() {
    for chain in chains() {
        let codec = codec(&chain);
        let run = || {
            let (mut encoder, mut prng) = (Encoder::new(codec.clone(), 3000), Prng::new(1));
            let step = |step| {
                let values: Vec<f32> = (0..3000).map(|_| prng.normal() as f32).collect();
                encode(&mut encoder, step, &values)
            };
            (0..3).map(step).collect::<Vec<_>>()
        };
        assert_eq!(run(), run(), "{chain}");
    }
}

/// A table is encoded chunk by chunk; what a chunk becomes does not depend on the others.
#[test]
fn stretches_are_independent() {
    for chain in chains() {
        let codec = codec(&chain);
        let mut prng = Prng::new(2);
        let values: Vec<f32> = (0..1000).map(|_| prng.normal() as f32).collect();
        let (mut one, mut other) = (Encoder::new(codec.clone(), 1000), Encoder::new(codec.clone(), 1000));
        for step in 0..3 {
            let part = |encoder: &mut Encoder, range: std::ops::Range<usize>| {
                let (mut payload, context) = (Vec::new(), context(step, 1000));
                encoder.encode(range.start, &values[range], &context, &mut payload).unwrap();
                payload
            };
            let forward = [part(&mut one, 0..300), part(&mut one, 300..1000)];
            let mut backward = [part(&mut other, 300..1000), part(&mut other, 0..300)];
            backward.reverse();
            assert_eq!(forward, backward, "{chain}");
        }
    }
}

#[test]
fn a_payload_of_another_codec_is_refused_by_name() {
    let payload = encode(&mut Encoder::new(codec("topk:0.01"), 100), 0, &[0.5; 100]);
    let mut values = vec![0.0; 100];
    let error = Decoder::new(codec("topk:0.02")).decode(&payload, &mut values).unwrap_err().to_string();
    assert!(error.contains("another codec than `topk:0.02`"), "{error}");
}

/// A payload that did not arrive goes back where it came from; with the values taken out too, nothing has happened.
#[test]
fn what_did_not_arrive_is_kept() {
    let len = 300;
    for chain in
        ["topk:0.1", "threshold:0.5+bitmap", "dvf:delta=0.1", "topk:0.2+f16+lz4", "onebit", "powersgd"]
    {
        let codec = codec(chain);
        let (before, lost) = (samples(len, 2).remove(0), samples(len, 3).remove(1));
        let mut encoder = Encoder::new(codec.clone(), len);
        encode(&mut encoder, 3, &before);
        let kept = encoder.residual().to_vec();
        let payload = encode(&mut encoder, 4, &lost);
        encoder.put_back(0, len, &payload);
        let near = |a: f32, b: f32| (a - b).abs() <= 1e-5 * (1.0 + a.abs() + b.abs());
        for (at, &rest) in encoder.residual().iter().enumerate() {
            assert!(near(rest, kept[at] + lost[at]), "{chain}: {rest} for {} + {}", kept[at], lost[at]);
        }
        let mut encoder = Encoder::new(codec, len);
        encode(&mut encoder, 3, &before);
        let payload = encode(&mut encoder, 4, &lost);
        encoder.undo(0, &lost, &payload);
        for (at, &rest) in encoder.residual().iter().enumerate() {
            let scale = 1.0 + lost[at].abs() + kept[at].abs();
            assert!((rest - kept[at]).abs() <= 1e-5 * scale, "{chain}: {rest} for {}", kept[at]);
        }
    }
}

/// What is kept of ranges without a gradient is held, bit for bit, whatever is done with the rest of the chunk; and what is
/// done with the rest is as if nothing had been kept of them.
#[test]
fn what_is_kept_of_absent_ranges_is_held() {
    let (len, absent) = (300, Absent::in_chunk(&[20..90, 100..101, 250..300], 0..300));
    let is_absent = |at: usize| absent.ranges().iter().any(|range| range.contains(&(at as u32)));
    for chain in chains() {
        let codec = codec(&chain);
        let (before, mut values) = (samples(len, 2).remove(0), samples(len, 3).remove(0));
        absent.clear_in(&mut values);
        let mut encoder = Encoder::new(codec.clone(), len);
        encode(&mut encoder, 3, &before);
        let kept = encoder.residual().to_vec();
        let held = |encoder: &Encoder| {
            let residual = encoder.residual().iter().enumerate();
            residual.filter(|(at, _)| is_absent(*at)).all(|(at, value)| value.to_bits() == kept[at].to_bits())
        };
        let payload = encoder.holding(0, &absent, |encoder| encode(encoder, 4, &values));
        assert!(held(&encoder), "{chain}");
        encoder.holding(0, &absent, |encoder| encoder.undo(0, &values, &payload));
        assert!(held(&encoder), "{chain}: undone");
        encoder.holding(0, &absent, |encoder| encoder.put_back(0, len, &payload));
        assert!(held(&encoder), "{chain}: put back");
        // A refused gradient leaves it there too.
        values[0] = f32::NAN;
        let refused = encoder
            .holding(0, &absent, |encoder| encoder.encode(0, &values, &context(5, len), &mut Vec::new()));
        assert!(refused.is_err(), "{chain}");
        assert!(held(&encoder), "{chain}: refused");
    }
}

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
