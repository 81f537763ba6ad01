//! Stretches as they are encoded and decoded, one by one.

use super::{LENGTHS, bits, chains, codec, context, encode, examples_of, norm, samples};
use paramill_core::codec::{CodecError, Context, Decoder, Encoder, Kind};
use paramill_core::kernels;
use paramill_core::prng::Prng;

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
