//! Parameter Flow, Figure 4: what byte compressors make of a sparse vector, and how long they take.

use super::{Experiment, Report};
use crate::output::{Align, Table};
use crate::plot::{Body, Chart, Line};
use anyhow::{Context as _, Result};
use paramill_core::codec::{Codec, Context, Encoder};
use paramill_core::prng::Prng;
use paramill_core::registry::Registry;
use paramill_sim::reproduce::Finding;
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "pf-snappy",
    about: "Parameter Flow: snappy makes a vector of 50M values with 80% zeros 3.1 times smaller in 0.62 s",
    run,
};

const ELEMENTS: usize = 50_000_000;
/// The paper compresses whole vectors; ours are cut as the data plane cuts them, into the largest chunks there are.
const CHUNK: usize = 1 << 16;
const SPARSITIES: [f64; 7] = [0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95];
/// The paper's rule and libraries, and what else there is here.
const CODECS: [&str; 6] = ["hybrid", "hybrid+snappy", "hybrid+lz4", "hybrid+zstd", "auto", "auto+zstd"];
const PAPER_RATIO: f64 = 3.1;
const PAPER_SECONDS: f64 = 0.62;

#[derive(Debug, Serialize)]
struct PfSnappy {
    seed: u64,
    elements: usize,
    points: Vec<Point>,
}

#[derive(Debug, Serialize)]
struct Point {
    codec: &'static str,
    sparsity: f64,
    ratio: f64,
    /// On one core of this machine.
    seconds: f64,
}

fn run(seed: u64) -> Result<Report> {
    let registry = Registry::builtin();
    let mut points = Vec::new();
    for sparsity in SPARSITIES {
        let mut prng = Prng::fork(seed, (sparsity * 1000.0) as u64);
        let values: Vec<f32> =
            (0..ELEMENTS).map(|_| if prng.chance(sparsity) { 0.0 } else { prng.normal() as f32 }).collect();
        for codec in CODECS {
            let codec_ends = Arc::new(Codec::parse(&registry.codec, codec)?);
            let (mut encoder, mut bytes, mut payload) = (Encoder::new(codec_ends, ELEMENTS), 0, Vec::new());
            let began = Instant::now();
            for (number, chunk) in values.chunks(CHUNK).enumerate() {
                payload.clear();
                encoder.encode(number * CHUNK, chunk, &Context::default(), &mut payload)?;
                bytes += payload.len();
            }
            let seconds = began.elapsed().as_secs_f64();
            points.push(Point { codec, sparsity, ratio: 4.0 * ELEMENTS as f64 / bytes as f64, seconds });
        }
    }
    let result = PfSnappy { seed, elements: ELEMENTS, points };
    Ok(Report {
        title: format!("Parameter Flow, Figure 4: {ELEMENTS} values, one core, seed {seed}"),
        data: serde_json::to_value(&result)?,
        tables: vec![
            ("How many times smaller, by the part of zeros".into(), table(&result, |point| format!("{:.2}", point.ratio))),
            ("Seconds to compress".into(), table(&result, |point| format!("{:.2}", point.seconds))),
        ],
        findings: findings(&result)?,
        notes: vec![
            "`hybrid` is the paper's rule: places and values above 80% zeros, one array below. At 80% some chunks are above \
             and some below."
                .into(),
            "zlib, the slowest of the paper's four, is not built in; zstd takes its place. Values are normal and random: \
             only zeros and places can be compressed."
                .into(),
        ],
        chart: chart(&result),
    })
}

fn at(result: &PfSnappy, codec: &str, sparsity: f64) -> Result<(f64, f64)> {
    let point = result.points.iter().find(|point| point.codec == codec && point.sparsity == sparsity);
    point.map(|point| (point.ratio, point.seconds)).context("every point was measured")
}

fn findings(result: &PfSnappy) -> Result<Vec<Finding>> {
    let (ratio, seconds) = at(result, "hybrid+snappy", 0.8)?;
    let (own_ratio, own_seconds) = at(result, "auto", 0.8)?;
    Ok(vec![
        Finding {
            claim: format!("snappy makes 80% zeros {PAPER_RATIO} times smaller"),
            holds: (ratio / PAPER_RATIO - 1.0).abs() < 0.1,
            ours: format!("{ratio:.2} times"),
        },
        Finding {
            claim: format!("in {PAPER_SECONDS} s on a core of 2.4 GHz"),
            holds: seconds < 1.5 * PAPER_SECONDS,
            ours: format!("{seconds:.2} s"),
        },
        Finding {
            claim: "(beyond the paper) a bitmap does better than a byte compressor".into(),
            holds: own_ratio > ratio && own_seconds < seconds,
            ours: format!("{own_ratio:.2} times in {own_seconds:.2} s"),
        },
    ])
}

fn table(result: &PfSnappy, cell: fn(&Point) -> String) -> Table {
    let mut headings = vec![("codec".to_owned(), Align::Left)];
    headings.extend(SPARSITIES.map(|sparsity| (format!("{:.0}%", sparsity * 100.0), Align::Right)));
    let mut table = Table::new(headings);
    for codec in CODECS {
        let mut cells = vec![codec.to_owned()];
        cells.extend(result.points.iter().filter(|point| point.codec == codec).map(cell));
        table.row(cells);
    }
    table
}

fn chart(result: &PfSnappy) -> Chart {
    let line = |codec: &&str| Line {
        name: (*codec).to_owned(),
        points: result
            .points
            .iter()
            .filter(|point| point.codec == *codec)
            .map(|point| (point.sparsity, point.ratio))
            .collect(),
    };
    Chart {
        title: "What compressors make of a sparse vector (Parameter Flow, Figure 4)".into(),
        x_label: "part of zeros".into(),
        y_label: "times smaller".into(),
        body: Body::Lines(CODECS.iter().map(line).collect()),
    }
}
