//! A model whose layers are computed by waiting: their gradients leave, and their parameters are waited for, as in training.

use super::plan::{Compute, Exchange};
use anyhow::Result;
use paramill_node::client::{Handle, Job, Slab};
use paramill_sim::compute::{LayerTimes, SendMode, Stage};
use std::time::{Duration, Instant};

/// A shorter wait is not worth a call of the system, which takes as long. It is waited for with the next one.
const SHORTEST_SLEEP: Duration = Duration::from_micros(100);

/// The layers of a model.
pub(super) struct Layers {
    compute: Compute,
    times: LayerTimes,
    layers: Vec<Layer>,
    /// When what was computed so far is done. Sleeps that last too long do not add up.
    free_at: Instant,
}

/// One of the two is there: the memory, or the wait for it.
struct Layer {
    here: Option<Slab>,
    away: Option<Handle<Vec<Slab>>>,
}

impl Layers {
    /// One layer for each tensor, in order.
    pub(super) fn new(exchange: &Exchange, compute: Compute, slabs: Vec<Slab>) -> Layers {
        let layers = slabs.into_iter().map(|slab| Layer { here: Some(slab), away: None }).collect();
        Layers { compute, times: exchange.layer_times(), layers, free_at: Instant::now() }
    }

    /// A pause is over: the computation begins now.
    pub(super) fn begin(&mut self) {
        self.free_at = Instant::now();
    }

    /// One iteration.
    pub(super) fn step(&mut self, job: &Job) -> Result<()> {
        let is_layerwise = self.compute.send == SendMode::Layerwise;
        if !is_layerwise {
            self.await_all()?;
        }
        for number in 0..self.times.stages() {
            let stage = self.times.stage(number);
            if let Stage::Forward(layer) = stage {
                self.await_layer(layer)?;
            }
            self.free_at += self.times.time(stage, self.compute.step);
            if let Stage::Backward(layer) = stage
                && is_layerwise
            {
                self.wait_out();
                self.send(job, layer)?;
            }
        }
        self.wait_out();
        if !is_layerwise {
            (0..self.layers.len()).try_for_each(|layer| self.send(job, layer))?;
        }
        job.clock();
        Ok(())
    }

    /// Waits until the parameters of all layers are here.
    pub(super) fn await_all(&mut self) -> Result<()> {
        (0..self.layers.len()).try_for_each(|layer| self.await_layer(layer))
    }

    /// All slabs, once their parameters are here.
    pub(super) fn into_slabs(mut self) -> Result<Vec<Slab>> {
        self.await_all()?;
        Ok(self.layers.into_iter().filter_map(|layer| layer.here).collect())
    }

    fn await_layer(&mut self, layer: usize) -> Result<()> {
        let Some(handle) = self.layers[layer].away.take() else { return Ok(()) };
        let was_waited_for = !handle.is_due();
        self.layers[layer].here = handle.wait()?.pop();
        if was_waited_for {
            self.free_at = self.free_at.max(Instant::now());
        }
        Ok(())
    }

    fn send(&mut self, job: &Job, layer: usize) -> Result<()> {
        let layer = &mut self.layers[layer];
        let mut slabs: Vec<Slab> = layer.here.take().into_iter().collect();
        layer.away = Some(job.exchange(&mut slabs)?);
        Ok(())
    }

    /// Sleeps until the computation so far is done.
    fn wait_out(&self) {
        let left = self.free_at.saturating_duration_since(Instant::now());
        if left >= SHORTEST_SLEEP {
            std::thread::sleep(left);
        }
    }
}
