//! A million inputs that nobody sent, for every family of decoders: bytes at random, and good ones with some of them
//! changed, cut off or added. From seeds, so that a failure comes again. `fuzz/` looks for worse ones.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod families;

use families::{LOW_RANK, PACKED, QUANTISED, SPARSE, families, family};
use paramill_core::codec::Codec;
use paramill_core::prng::Prng;
use paramill_core::registry::Registry;

const INPUTS: u64 = 1_000_000;

macro_rules! attacks {
    ($($name:ident),*) => {
        $(
            #[test]
            fn $name() {
                attack(stringify!($name));
            }
        )*

        #[test]
        fn every_family_is_attacked() {
            let names: Vec<&str> = families().iter().map(|(name, _)| *name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

attacks!(sparse, quantised, packed, low_rank, delta, frames);

/// Whatever comes is read or refused, and never half applied.
fn attack(name: &str) {
    let inputs = INPUTS / families().len() as u64 + 1;
    let mut family = family(name);
    let (good, mut prng) = (family.good(), Prng::new(name.len() as u64));
    for input in &good {
        assert!(family.check(input), "{name}: {input:?}");
    }
    let mut read = 0;
    for _ in 0..inputs {
        read += u64::from(family.check(&hostile(&good, &mut prng)));
    }
    // Both ends of the decoders were seen.
    assert!(read > inputs / 200 && read < inputs * 9 / 10, "{name}: {read} of {inputs} were read");
}

fn hostile(good: &[Vec<u8>], prng: &mut Prng) -> Vec<u8> {
    let mut input = good[prng.below(good.len() as u64) as usize].clone();
    let byte = |prng: &mut Prng| prng.next_u64() as u8;
    match prng.below(6) {
        0 => input = (0..prng.below(100)).map(|_| byte(prng)).collect(),
        1 => input.truncate(prng.below(input.len() as u64 + 1) as usize),
        2 => input.extend((0..prng.below(20)).map(|_| byte(prng))),
        // The head of a good one, so that more is looked at than that.
        3 => input.iter_mut().skip(9).for_each(|place| *place = byte(prng)),
        _ => {
            for _ in 0..=prng.below(4) {
                let at = prng.below(input.len() as u64) as usize;
                input[at] = byte(prng);
            }
        }
    }
    input
}

/// A codec that is registered is in some family.
#[test]
fn every_codec_is_in_a_family() {
    let axis = Registry::builtin().codec;
    let chains: Vec<String> = [SPARSE, QUANTISED, PACKED, LOW_RANK]
        .concat()
        .iter()
        .map(|text| Codec::parse(&axis, text).unwrap().to_string())
        .collect();
    for entry in axis.entries() {
        let has = |chain: &String| chain.split('+').any(|stage| stage.split(':').next() == Some(entry.name));
        assert!(chains.iter().any(has), "no chain has `{}`: add one in families.rs", entry.name);
    }
}
