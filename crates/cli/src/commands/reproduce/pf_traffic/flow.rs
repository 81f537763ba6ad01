//! Push and broadcast (UCC) of whole tables, in one thread: who sends how many bytes in which clock. No role of the system
//! takes part; only its codecs do.

use anyhow::Result;
use paramill_core::codec::{Codec, Context, Decoder, Encoder};
use paramill_core::kernels;
use paramill_core::limits::BLOCK_ELEMENTS;
use paramill_core::prng::Prng;
use paramill_core::registry::Registry;
use paramill_train::{Touched, Workload, WorkloadConfig};
use std::sync::Arc;

pub(super) const WORKERS: u32 = 8;
/// Learning rate of the first clock; it sinks with the square root of clocks, as the paper's theorems want it.
const LEARNING_RATE: f32 = 2.0;

/// What a run sent, and how far it came.
pub(super) struct Traffic {
    /// By clock, pushes of all workers and the broadcast to all of them.
    pub(super) bytes: Vec<u64>,
    /// What a clock would take without codec.
    pub(super) dense_bytes: u64,
    /// The part of updates that was dropped, on average over pushes and broadcasts. An entry that is zero is no update.
    pub(super) dropped: f64,
    /// Mean loss on held-out data at the end.
    pub(super) loss: f64,
}

/// Workers with their copies of the parameters, which are all the same: they apply what is broadcast.
pub(super) struct Flow {
    workers: Vec<Box<dyn Workload>>,
    /// All tables, one after the other.
    parameters: Vec<f32>,
    sizes: Vec<usize>,
    seed: u64,
}

/// Both ends of a codec.
struct Link {
    encoder: Encoder,
    decoder: Decoder,
    payload: Vec<u8>,
    received: Vec<f32>,
    /// Updates that were sent, of those that could have been: what is not zero with what was kept before.
    sent: [u64; 2],
}

impl Link {
    fn new(codec: &Arc<Codec>, elements: usize) -> Link {
        let (encoder, decoder) = (Encoder::new(codec.clone(), elements), Decoder::new(codec.clone()));
        Link { encoder, decoder, payload: Vec::new(), received: Vec::new(), sent: [0; 2] }
    }

    /// Sends an update, which is added to `sum`; how many bytes it took.
    fn send(&mut self, clock: u64, update: &[f32], sum: &mut [f32]) -> Result<u64> {
        let mut bytes = 0;
        for (number, (update, sum)) in
            update.chunks(BLOCK_ELEMENTS).zip(sum.chunks_mut(BLOCK_ELEMENTS)).enumerate()
        {
            self.payload.clear();
            let (context, start) = (Context { step: clock, ..Context::default() }, number * BLOCK_ELEMENTS);
            let kept = self.encoder.residual().get(start..start + update.len());
            let is_update = |at: &usize| update[*at] + kept.map_or(0.0, |kept| kept[*at]) != 0.0;
            self.sent[1] += (0..update.len()).filter(is_update).count() as u64;
            self.encoder.encode(start, update, &context, &mut self.payload)?;
            self.received.resize(update.len(), 0.0);
            self.decoder.decode(&self.payload, &mut self.received)?;
            kernels::add(sum, &self.received);
            self.sent[0] += self.received.iter().filter(|value| **value != 0.0).count() as u64;
            bytes += self.payload.len() as u64;
        }
        Ok(bytes)
    }
}

impl Flow {
    pub(super) fn new(workload: &str, seed: u64) -> Result<Flow> {
        let config = WorkloadConfig { seed, workers: WORKERS, ..WorkloadConfig::new(workload)? };
        let workers = paramill_train::build_all(&config)?;
        let tables = 0..workers[0].tables().len();
        let initial: Vec<Vec<f32>> = tables.map(|table| workers[0].initial(table)).collect();
        let sizes = initial.iter().map(Vec::len).collect();
        Ok(Flow { workers, parameters: initial.concat(), sizes, seed })
    }

    /// How many parameters there are.
    pub(super) fn elements(&self) -> usize {
        self.parameters.len()
    }

    /// UCC under BSP (staleness 0) or SSP: a fast worker's updates are folded in, and it waits when it is so many clocks
    /// ahead of the parameters (Parameter Flow, eq. 5). Traffic is that of the first `clocks` clocks. Fast workers go on
    /// after them until the last of these has been broadcast, so that the last broadcasts are not emptier than others.
    pub(super) fn train(&mut self, codec: &str, staleness: u64, clocks: u64) -> Result<Traffic> {
        let codec = Arc::new(Codec::parse(&Registry::builtin().codec, codec)?);
        let elements = self.parameters.len();
        let mut pushes: Vec<Link> = self.workers.iter().map(|_| Link::new(&codec, elements)).collect();
        let mut broadcast = Link::new(&codec, elements);
        let (mut done, mut prng) = (vec![0u64; self.workers.len()], Prng::fork(self.seed, 99));
        let mut ready: Vec<f64> = done.iter().map(|_| prng.exponential(1.0)).collect();
        let (mut bytes, mut sum, mut version) = (vec![0; clocks as usize], vec![0.0; elements], 0);
        while version < clocks {
            // The next to finish its computation among those that may go on.
            let may_go = |worker: &usize| done[*worker] <= version + staleness;
            let Some(next) = (0..done.len()).filter(may_go).min_by(|a, b| ready[*a].total_cmp(&ready[*b]))
            else {
                break;
            };
            let update = self.update(next, done[next]);
            let sent = pushes[next].send(done[next], &update, &mut sum)?;
            if let Some(bytes) = bytes.get_mut(done[next] as usize) {
                *bytes += sent;
            }
            done[next] += 1;
            ready[next] += prng.exponential(1.0);
            if done.iter().all(|done| *done > version) {
                let update = std::mem::replace(&mut sum, vec![0.0; elements]);
                let sent = broadcast.send(version, &update, &mut self.parameters)?;
                bytes[version as usize] += sent * u64::from(WORKERS);
                version += 1;
            }
        }
        // Each worker's push, and the broadcast to each of them, is an operation.
        let mut sent = broadcast.sent.map(|count| count * u64::from(WORKERS));
        for link in &pushes {
            sent = [0, 1].map(|at| sent[at] + link.sent[at]);
        }
        let (loss, dense_bytes) = (self.loss(), 2 * u64::from(WORKERS) * 4 * elements as u64);
        Ok(Traffic { bytes, dense_bytes, dropped: 1.0 - sent[0] as f64 / sent[1].max(1) as f64, loss })
    }

    /// A worker's update of a step: minus the learning rate times its share of the mean gradient.
    fn update(&mut self, worker: usize, step: u64) -> Vec<f32> {
        let workload = &mut self.workers[worker];
        let (touched, specs) = (workload.prepare(step), workload.tables());
        let mut starts = Vec::new();
        let mut gathered: Vec<Vec<f32>> = Vec::new();
        let mut start = 0;
        for ((touched, spec), size) in touched.iter().zip(&specs).zip(&self.sizes) {
            let table = &self.parameters[start..start + size];
            let width = spec.row_elements() as usize;
            gathered.push(match touched {
                Touched::All => table.to_vec(),
                Touched::Rows(rows) => rows
                    .iter()
                    .flat_map(|&row| &table[row as usize * width..(row as usize + 1) * width])
                    .copied()
                    .collect(),
            });
            starts.push(start);
            start += size;
        }
        let views: Vec<&[f32]> = gathered.iter().map(Vec::as_slice).collect();
        let mut gradients = vec![Vec::new(); specs.len()];
        workload.step(&views, &mut gradients);
        let mut update = vec![0.0; self.parameters.len()];
        let scale = -LEARNING_RATE / ((step + 1) as f32).sqrt() / WORKERS as f32;
        for (((touched, spec), start), gradient) in touched.iter().zip(&specs).zip(starts).zip(&gradients) {
            match touched {
                Touched::All => {
                    kernels::add_scaled(&mut update[start..start + gradient.len()], gradient, scale)
                }
                Touched::Rows(rows) => {
                    let width = spec.row_elements() as usize;
                    for (&row, gradient) in rows.iter().zip(gradient.chunks_exact(width)) {
                        let at = start + row as usize * width;
                        kernels::add_scaled(&mut update[at..at + width], gradient, scale);
                    }
                }
            }
        }
        update
    }

    /// Mean loss on held-out data.
    pub(super) fn loss(&self) -> f64 {
        let mut rest = self.parameters.as_slice();
        let tables: Vec<&[f32]> = self
            .sizes
            .iter()
            .map(|size| {
                let (table, after) = rest.split_at(*size);
                rest = after;
                table
            })
            .collect();
        self.workers[0].evaluate(&tables).loss
    }
}
