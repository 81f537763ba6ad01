//! What an encoder keeps: nothing of what was put in is lost.

use super::{chains, codec, context, encode, examples_of, norm, samples};
use paramill_core::absence::Absent;
use paramill_core::codec::{Decoder, Encoder, Kind};
use paramill_core::kernels;
use paramill_core::prng::Prng;

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
