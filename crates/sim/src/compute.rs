//! How long a worker computes: constant, with jitter, with transient stragglers, or as a trace says.

use paramill_core::fault::FaultPlan;
use paramill_core::prng::Prng;
use paramill_core::types::{Clock, WorkerId};
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
}

impl Default for ComputeModel {
    fn default() -> ComputeModel {
        ComputeModel { step_ms: 10.0, jitter: 0.05, straggle_p: 0.0, straggle_factor: 1.0 }
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
        let model = ComputeModel { step_ms: 10.0, jitter: 0.5, straggle_p: 0.1, straggle_factor: 6.0 };
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
    fn bad_numbers_are_named() {
        let model = ComputeModel { straggle_p: 1.5, ..Default::default() };
        assert!(model.check().unwrap_err().contains("compute.straggle_p = 1.5: expected a number from 0 to"));
    }
}
