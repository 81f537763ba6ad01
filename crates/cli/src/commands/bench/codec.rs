//! `paramill bench codec`: how much smaller codecs make a gradient, how fast, and what they lose.

use super::statistics::Spread;
use crate::args::CodecArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::{Align, Output, Table};
use anyhow::{Context as _, Result, ensure};
use paramill_core::codec::{
    Codec, Context, Decoder, Encoder, FactorFrames, LayerRange, Products, TableGradient, Written,
};
use paramill_core::kernels;
use paramill_core::prng::Prng;
use paramill_core::registry::Registry;
use paramill_core::store::Buffer;
use paramill_node::client::Threads;
use serde::Serialize;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

const GB: f64 = 1e9;
const MAX_ELEMENTS: usize = 1 << 28;
const MAX_THREADS: usize = 64;
const SEED: u64 = 1;

/// What was measured. A GB is 10^9 bytes of f32; decoding is on one core.
#[derive(Debug, Serialize)]
struct Report {
    elements: usize,
    /// Elements that are encoded at a time.
    chunk: usize,
    /// Threads that encode together.
    threads: usize,
    /// The part of the values that is zero.
    sparsity: f64,
    rounds: u32,
    /// The codec's own, when there is only one.
    #[serde(flatten)]
    only: Option<Measured>,
    codecs: Vec<Measured>,
}

#[derive(Debug, Clone, Serialize)]
struct Measured {
    codec: String,
    /// Bytes of the values for every byte that travels.
    ratio: f64,
    encode_gb_s: f64,
    encode_spread_gb_s: Spread,
    /// Adding what travelled to a sum.
    decode_gb_s: f64,
    decode_spread_gb_s: Spread,
    /// L2 norm of what the first step loses, relative to the values'.
    relative_error: f64,
    /// Between what was sent first and what was received.
    cosine: f64,
    /// L2 norm of what is kept for later after the last round, relative to the values'.
    residual_norm: f64,
}

pub(super) fn run(args: &CodecArgs, registry: &Registry, output: &Output) -> Result<(), Failure> {
    let texts: Vec<String> = if args.codec.is_empty() {
        registry.codec.entries().iter().map(|entry| entry.example.to_owned()).collect()
    } else {
        args.codec.clone()
    };
    let codecs = texts
        .iter()
        .map(|text| Ok(Arc::new(Codec::parse(&registry.codec, text)?)))
        .collect::<Result<Vec<_>>>()
        .or_usage()?;
    check(args).or_usage()?;
    let values = match &args.data {
        Some(path) => read(path).or_usage()?,
        None => draw(args.elements, args.sparsity),
    };
    let zeros = values.as_slice().iter().filter(|value| **value == 0.0).count();
    let mut report = Report {
        elements: values.len(),
        chunk: args.chunk,
        threads: args.threads,
        sparsity: zeros as f64 / values.len() as f64,
        rounds: args.rounds,
        only: None,
        codecs: Vec::new(),
    };
    let mut progress = output.progress(codecs.len() as u64);
    for (done, codec) in codecs.into_iter().enumerate() {
        progress.set(done as u64, &format!("codecs: {codec}"));
        report.codecs.push(measure(codec, values.as_slice(), args)?);
    }
    drop(progress);
    if let [only] = &report.codecs[..] {
        report.only = Some(only.clone());
    }
    Ok(report.print(output)?)
}

fn check(args: &CodecArgs) -> Result<()> {
    ensure!(
        (1..=MAX_ELEMENTS).contains(&args.elements),
        "--elements {}: expected 1 to {MAX_ELEMENTS}",
        args.elements
    );
    ensure!(
        (1..=MAX_THREADS).contains(&args.threads),
        "--threads {}: expected 1 to {MAX_THREADS}",
        args.threads
    );
    ensure!((0.0..=1.0).contains(&args.sparsity), "--sparsity {}: expected 0 to 1", args.sparsity);
    ensure!((1..=1000).contains(&args.rounds), "--rounds {}: expected 1 to 1000", args.rounds);
    let longest = paramill_core::limits::MAX_DATA_ELEMENTS;
    ensure!((1..=longest).contains(&args.chunk), "--chunk {}: expected 1 to {longest}", args.chunk);
    Ok(())
}

/// Normal values, and as many zeros among them as were asked for.
fn draw(elements: usize, sparsity: f64) -> Buffer {
    let (mut values, mut prng) = (Buffer::zeroed(elements), Prng::new(SEED));
    for value in values.as_mut_slice() {
        if !prng.chance(sparsity) {
            *value = prng.normal() as f32;
        }
    }
    values
}

/// A file of f32, little-endian.
fn read(path: &Path) -> Result<Buffer> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(
        !bytes.is_empty() && bytes.len().is_multiple_of(4) && bytes.len() / 4 <= MAX_ELEMENTS,
        "{} has {} bytes: expected 1 to {MAX_ELEMENTS} values of four bytes",
        path.display(),
        bytes.len()
    );
    let mut values = Buffer::zeroed(bytes.len() / 4);
    for (value, bytes) in values.as_mut_slice().iter_mut().zip(bytes.as_chunks::<4>().0) {
        *value = f32::from_le_bytes(*bytes);
    }
    ensure!(kernels::all_finite(values.as_slice()), "{} has NaN or Inf in it", path.display());
    Ok(values)
}

fn measure(codec: Arc<Codec>, values: &[f32], args: &CodecArgs) -> Result<Measured> {
    let mut bench = Bench::new(codec.clone(), values, args);
    // The first step shows what is lost, and touches every page.
    bench.encode(0)?;
    bench.decode()?;
    let (norm, received) = (kernels::squared_norm(values).sqrt(), bench.sum.as_slice());
    let (mut error, mut product) = (0.0, 0.0);
    for (value, received) in values.iter().zip(received) {
        error += (f64::from(*value) - f64::from(*received)).powi(2);
        product += f64::from(*value) * f64::from(*received);
    }
    let cosine = product / (norm * kernels::squared_norm(received).sqrt());
    let bytes = values.len() as f64 * 4.0;
    let (mut encode, mut decode, mut sent) = (Vec::new(), Vec::new(), 0);
    for round in 0..args.rounds {
        let began = Instant::now();
        bench.encode(u64::from(round) + 1)?;
        encode.push(bytes / began.elapsed().as_secs_f64() / GB);
        let began = Instant::now();
        bench.decode()?;
        decode.push(bytes / began.elapsed().as_secs_f64() / GB);
        sent += bench.payloads.len();
    }
    let (encode, decode) = (Spread::of(&encode), Spread::of(&decode));
    Ok(Measured {
        codec: codec.to_string(),
        ratio: bytes * f64::from(args.rounds) / sent as f64,
        encode_gb_s: encode.median,
        encode_spread_gb_s: encode,
        decode_gb_s: decode.median,
        decode_spread_gb_s: decode,
        relative_error: error.sqrt() / norm,
        cosine,
        residual_norm: kernels::squared_norm(bench.encoder.residual()).sqrt() / norm,
    })
}

/// Both ends of a codec, and what travels between them.
struct Bench<'a> {
    encoder: Encoder,
    decoder: Decoder,
    values: &'a [f32],
    /// The values are one layer, without rows of their own.
    layers: [LayerRange; 1],
    chunks: Vec<Range<usize>>,
    threads: Threads,
    payloads: Written,
    factors: Vec<FactorFrames>,
    ranges: Vec<Range<usize>>,
    sum: Buffer,
}

impl<'a> Bench<'a> {
    fn new(codec: Arc<Codec>, values: &'a [f32], args: &CodecArgs) -> Bench<'a> {
        let chunk = args.chunk;
        let starts = (0..values.len()).step_by(chunk);
        Bench {
            encoder: Encoder::new(codec.clone(), values.len()),
            decoder: Decoder::new(codec),
            values,
            layers: [LayerRange { elements: 0..values.len(), columns: 0 }],
            chunks: starts.map(|start| start..values.len().min(start + chunk)).collect(),
            threads: Threads::new(args.threads),
            payloads: Written::default(),
            factors: Vec::new(),
            ranges: Vec::new(),
            sum: Buffer::zeroed(values.len()),
        }
    }

    fn encode(&mut self, step: u64) -> Result<()> {
        let gradient = TableGradient {
            values: self.values,
            clips_non_finite: false,
            absent: &[],
            layers: &self.layers,
            chunks: &self.chunks,
            factors: None,
            step,
            seed: step << 32,
        };
        let layer_elements = self.values.len() as u64;
        let context = |number: usize| Context {
            step,
            seed: (step << 32) + number as u64,
            layer_elements,
            ..Context::default()
        };
        (self.factors, self.ranges) =
            self.encoder.encode_table(&gradient, context, &self.threads, &mut self.payloads)?;
        Ok(())
    }

    fn decode(&mut self) -> Result<()> {
        let mut products = Products::default();
        for range in self.factors.iter().flat_map(|layer| &layer.payloads) {
            self.decoder.take_factors(self.payloads.get(range.clone()), &self.layers, &mut products)?;
        }
        for (chunk, range) in self.chunks.iter().zip(&self.ranges) {
            let content =
                self.decoder.read_chunk(self.payloads.get(range.clone()), chunk.clone(), &products)?;
            content.add_to(&mut self.sum.as_mut_slice()[chunk.clone()]);
        }
        Ok(())
    }
}

impl Report {
    fn print(&self, output: &Output) -> Result<()> {
        if output.json() {
            return Ok(output.object(self)?);
        }
        output.text(format!(
            "{} values, {:.1}% zeros, {} at a time, encoded by {} and decoded on one core; GB/s of f32",
            self.elements,
            self.sparsity * 100.0,
            self.chunk,
            if self.threads == 1 { "one thread".to_owned() } else { format!("{} threads", self.threads) },
        ))?;
        let mut table = Table::new([
            ("codec", Align::Left),
            ("ratio", Align::Right),
            ("encode", Align::Right),
            ("decode and add", Align::Right),
            ("relative error", Align::Right),
            ("cosine", Align::Right),
            ("residual", Align::Right),
        ]);
        for measured in &self.codecs {
            table.row([
                measured.codec.clone(),
                format!("{:.2}", measured.ratio),
                format!("{:.2}", measured.encode_gb_s),
                format!("{:.2}", measured.decode_gb_s),
                format!("{:.4}", measured.relative_error),
                format!("{:.4}", measured.cosine),
                format!("{:.3}", measured.residual_norm),
            ]);
        }
        Ok(output.table(&table)?)
    }
}
