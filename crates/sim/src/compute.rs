//! How long a worker computes: constant, with jitter, with transient stragglers, or as a trace says; and how that time is
//! divided among the layers of a model.

use paramill_core::fault::FaultPlan;
use paramill_core::prng::Prng;
use paramill_core::types::{Clock, Time, WorkerId};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The time of one iteration's computation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ComputeModel {
    /// The shortest, in milliseconds.
    pub step_ms: f64,
    /// Added to it: exponential with this mean, relative to `step_ms`.
    pub jitter: f64,
    /// With this probability an iteration takes `straggle_factor` times as long: a transient straggler.
    pub straggle_p: f64,
    /// How much longer a straggling iteration takes.
    pub straggle_factor: f64,
    /// The model whose layer list the tables are ([`crate::models`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// When gradients leave, and what a forward pass waits for.
    pub send: SendMode,
}

/// When the gradients of an iteration leave, and what the next one waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SendMode {
    /// All of them after the backward pass; the next forward pass waits for all parameters.
    #[default]
    End,
    /// Each as soon as its layer's backward is done; a layer's forward waits for its own parameters only.
    Layerwise,
}

impl Default for ComputeModel {
    fn default() -> ComputeModel {
        ComputeModel {
            step_ms: 10.0,
            jitter: 0.05,
            straggle_p: 0.0,
            straggle_factor: 1.0,
            model: None,
            send: SendMode::End,
        }
    }
}

impl ComputeModel {
    /// Whether the numbers can be used; the error says why not.
    pub fn check(&self) -> Result<(), String> {
        for (name, value, min, max) in [
            ("step_ms", self.step_ms, 0.0, 1e9),
            ("jitter", self.jitter, 0.0, 1e6),
            ("straggle_p", self.straggle_p, 0.0, 1.0),
            ("straggle_factor", self.straggle_factor, 1.0, 1e6),
        ] {
            if !(min..=max).contains(&value) {
                return Err(format!("compute.{name} = {value}: expected a number from {min} to {max:e}"));
            }
        }
        Ok(())
    }
}

/// The layers of a model in the order in which a step computes them: forward from the first to the last, then backward.
///
/// A layer's share of the step is its share of the model's multiply-accumulates. A backward pass has two products for each one
/// of the forward pass, so that it takes two thirds of the time.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerTimes {
    /// The end of each layer's part of a forward pass, from 0 to 1.
    ends: Vec<f64>,
}

/// One layer's part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// It reads its parameters.
    Forward(usize),
    /// Its gradient is there once this is done.
    Backward(usize),
}

impl LayerTimes {
    /// Layers with these measures of work, which may not all be zero.
    pub fn new(work: &[u64]) -> LayerTimes {
        let total: u64 = work.iter().sum::<u64>().max(1);
        let mut sum = 0;
        let ends = work.iter().map(|layer| {
            sum += layer;
            sum as f64 / total as f64
        });
        LayerTimes { ends: ends.collect() }
    }

    /// Parts of a step: two for each layer.
    pub fn stages(&self) -> usize {
        2 * self.ends.len()
    }

    /// The part of a step with this number, from 0.
    pub fn stage(&self, number: usize) -> Stage {
        match number.checked_sub(self.ends.len()) {
            None => Stage::Forward(number),
            Some(done) => Stage::Backward(self.ends.len() - 1 - done),
        }
    }

    /// How long this part of a step takes, if nothing has to be waited for.
    pub fn time(&self, stage: Stage, step: Duration) -> Duration {
        let (layer, share) = match stage {
            Stage::Forward(layer) => (layer, 1.0 / 3.0),
            Stage::Backward(layer) => (layer, 2.0 / 3.0),
        };
        let begin = layer.checked_sub(1).map_or(0.0, |before| self.ends[before]);
        step.mul_f64((self.ends[layer] - begin).max(0.0) * share)
    }
}

/// Longer than any scenario.
const FOR_EVER: Duration = Duration::from_secs(100_000_000);

/// One worker's computation times.
#[derive(Debug)]
pub struct ComputeClock {
    worker: WorkerId,
    model: ComputeModel,
    faults: FaultPlan,
    prng: Prng,
}

impl ComputeClock {
    /// The times of `worker` under a model and the faults that slow it down.
    pub fn new(model: ComputeModel, faults: FaultPlan, seed: u64, worker: WorkerId) -> ComputeClock {
        let prng = Prng::fork(seed, 0x636F_6D70 << 32 | u64::from(worker.0));
        ComputeClock { worker, model, faults, prng }
    }

    /// How much longer a computation takes that would end at `end`: for ever, if the application hangs before that.
    pub fn stall(&self, end: Time) -> Duration {
        match self.faults.stall_at(self.worker) {
            Some(at) if at <= end => FOR_EVER,
            _ => Duration::ZERO,
        }
    }

    /// How long the iteration `clock` takes. Called once for each, in order.
    pub fn step(&mut self, clock: Clock) -> Duration {
        // The dice fall whatever the trace says, so that a trace for one worker changes no other draw.
        let jitter = if self.model.jitter > 0.0 { self.prng.exponential(self.model.jitter) } else { 0.0 };
        let straggles = self.model.straggle_p > 0.0 && self.prng.chance(self.model.straggle_p);
        let factor = if straggles { self.model.straggle_factor } else { 1.0 };
        let drawn = Duration::from_secs_f64(self.model.step_ms * 1e-3 * (1.0 + jitter) * factor);
        let time = self.faults.step_time(self.worker, clock).unwrap_or(drawn);
        time.mul_f64(self.faults.compute_factor(self.worker))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mean_ms(model: ComputeModel, faults: &[&str], worker: u32) -> f64 {
        let plan = FaultPlan::parse(faults).unwrap();
        let mut clock = ComputeClock::new(model, plan, 1, WorkerId(worker));
        (0..10_000).map(|i| clock.step(i).as_secs_f64() * 1e3).sum::<f64>() / 1e4
    }

    #[test]
    fn means_are_as_the_model_says() {
        let model = ComputeModel {
            step_ms: 10.0,
            jitter: 0.5,
            straggle_p: 0.1,
            straggle_factor: 6.0,
            ..Default::default()
        };
        let mean = mean_ms(model.clone(), &[], 0);
        assert!((mean - 10.0 * 1.5 * 1.5).abs() < 0.6, "{mean}");
        let slow = mean_ms(model, &["worker=1:slow=4x"], 1);
        assert!((slow / mean - 4.0).abs() < 0.2, "{slow}");
    }

    #[test]
    fn a_trace_replaces_the_drawn_times() {
        let mut plan = FaultPlan::parse(&["trace=t.csv", "worker=0:slow=2x"]).unwrap();
        plan.load_trace("t.csv", "0,0,1.5\n0,1,0.5\n").unwrap();
        let mut clock = ComputeClock::new(ComputeModel::default(), plan, 1, WorkerId(0));
        assert_eq!([clock.step(0), clock.step(1)].map(|time| time.as_secs_f64()), [3.0, 1.0]);
    }

    #[test]
    fn a_step_is_divided_by_work_and_goes_forward_then_backward() {
        let times = LayerTimes::new(&[1, 0, 3]);
        let stages: Vec<Stage> = (0..times.stages()).map(|number| times.stage(number)).collect();
        let (forward, backward) = (Stage::Forward, Stage::Backward);
        assert_eq!(stages, [forward(0), forward(1), forward(2), backward(2), backward(1), backward(0)]);
        let milliseconds = |stage: &Stage| times.time(*stage, Duration::from_millis(12)).as_secs_f64() * 1e3;
        assert_eq!(
            stages.iter().map(|stage| milliseconds(stage).round()).collect::<Vec<_>>(),
            [1., 0., 3., 6., 0., 2.]
        );
    }

    #[test]
    fn bad_numbers_are_named() {
        let model = ComputeModel { straggle_p: 1.5, ..Default::default() };
        assert!(model.check().unwrap_err().contains("compute.straggle_p = 1.5: expected a number from 0 to"));
    }
}
