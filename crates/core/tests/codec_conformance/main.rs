//! What every registered codec, and every chain of them, must keep. A new one is tested by being registered.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod registered;
mod residuals;
mod stretches;
mod tables;

use paramill_core::codec::{Codec, Context, Encoder, Kind, Stage};
use paramill_core::prng::Prng;
use paramill_core::registry::{Axis, Registry};
use paramill_core::spec::Spec;
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
