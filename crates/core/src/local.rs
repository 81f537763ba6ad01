//! Local steps: workers step by themselves, and synchronise now and then.
//!
//! A worker makes `h` steps of an *inner* optimizer on its own parameters, and then pushes its *pseudo-gradient*: the parameters of
//! its last synchronisation less those that it has now. The optimizer of the servers is the *outer* one, and steps by the mean of
//! the workers' pseudo-gradients (DiLoCo, algorithm 1). The model may be dealt into *fragments*, whose turns are spread over the `h`
//! steps, and answers may be merged `late` steps after the push (Streaming DiLoCo).
//!
//! [`LocalSteps`] is the schedule, and [`Replica`] what a worker holds of a table. Both know no network: applications ask them what
//! is due, and push and wait themselves. Every fragment is pushed once in each clock of the job, so that rounds, consistency
//! models, codecs and aggregators work as they do for gradients.

use crate::kernels;
use crate::optimizer::{OptimizerPolicy, StepInput};
use crate::registry::Registry;
use crate::spec::{Spec, SpecError};
use crate::types::Clock;
use serde::Deserialize;
use std::fmt;
use std::ops::RangeInclusive;

/// The outer optimizer where none is named: Nesterov momentum, with the values of DiLoCo.
pub const OUTER: &str = "nesterov:lr=0.7,beta=0.9";

/// The text of a job without local steps.
pub const NONE: &str = "none";

const H: RangeInclusive<u64> = 1..=1_000_000;

/// When a worker synchronises what: `steps:h=50,fragments=4,late=5,inner=(adam:lr=1e-3)`.
///
/// `Display` gives the text form back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalSteps {
    h: u64,
    fragments: u64,
    late: u64,
    inner: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    h: u64,
    #[serde(default = "one")]
    fragments: u64,
    #[serde(default)]
    late: u64,
    inner: Option<String>,
}

fn one() -> u64 {
    1
}

impl LocalSteps {
    /// Reads the text form; `none` is no local steps.
    pub fn parse(registry: &Registry, text: &str) -> Result<Option<LocalSteps>, SpecError> {
        let spec = Spec::parse(text)?;
        if spec.name == NONE && spec.params.is_empty() {
            return Ok(None);
        }
        if spec.name != "steps" {
            let why = format!(
                "`{text}`: expected none, or steps:h=50[,fragments=4][,late=5][,inner=(adam:lr=1e-3)]"
            );
            return Err(SpecError::Parameter { component: "local".into(), why });
        }
        let config: Result<Config, SpecError> = spec.config();
        let Config { h, fragments, late, inner } =
            config.map_err(|error| error.with_example("steps:h=50"))?;
        let (least, most) = (H.start(), H.end());
        spec.require(H.contains(&h), || format!("h = {h}: expected {least} to {most} steps"))?;
        spec.require((1..=h).contains(&fragments), || {
            format!("fragments = {fragments}: expected 1 to {h}, of which each has its step among h = {h}")
        })?;
        spec.require(late < h, || {
            format!("late = {late}: expected less than h = {h}, for an answer is merged before the next push")
        })?;
        let inner = inner.map(|text| unwrapped(&text).to_owned());
        if let Some(text) = &inner {
            inner_optimizer(registry, text)?;
        }
        Ok(Some(LocalSteps { h, fragments, late, inner }))
    }

    /// Steps from one synchronisation of a fragment to its next.
    pub fn h(&self) -> u64 {
        self.h
    }

    /// Parts of the model, each synchronised at a step of its own.
    pub fn fragments(&self) -> usize {
        self.fragments as usize
    }

    /// Steps from a push to the merge of its answer.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// The inner optimizer in text form, if it is named.
    pub fn inner(&self) -> Option<&str> {
        self.inner.as_deref()
    }

    /// The step of the job with which a clock begins; steps count from 0.
    pub fn first_step(&self, clock: Clock) -> u64 {
        clock * self.h
    }

    /// The fragment that is pushed when a worker has made so many steps of the job.
    pub fn pushed_after(&self, steps: u64) -> Option<usize> {
        let within = self.place(steps);
        (0..self.fragments()).find(|fragment| self.turn(*fragment) == within)
    }

    /// The fragment whose answer is merged when a worker has made so many steps of the job: it was pushed `late` steps before.
    pub fn merged_after(&self, steps: u64) -> Option<usize> {
        self.pushed_after(steps.checked_sub(self.late).filter(|pushed| *pushed > 0)?)
    }

    /// Whether the clock turns when a worker has made so many steps of the job, after the push of that step.
    pub fn turns_after(&self, steps: u64) -> bool {
        self.place(steps) == self.h
    }

    /// What is pushed after the last of `total` steps, so that no step is lost: for each clock from the first that is named on,
    /// the fragments that have changed since they were pushed.
    pub fn closing(&self, total: u64) -> (Clock, Vec<Vec<usize>>) {
        let (open, made) = (total / self.h, total % self.h);
        let those = |wanted: &dyn Fn(u64) -> bool| -> Vec<usize> {
            (0..self.fragments()).filter(|fragment| wanted(self.turn(*fragment))).collect()
        };
        let clocks: Vec<Vec<usize>> = match made {
            _ if total == 0 => Vec::new(),
            0 => vec![those(&|turn| turn < self.h)],
            _ => vec![those(&|turn| turn > made), those(&|turn| turn < made)],
        };
        (open, clocks.into_iter().filter(|fragments| !fragments.is_empty()).collect())
    }

    /// Deals tables of these sizes into fragments of about equal size; the fragment of each table. A table stays whole.
    pub fn deal(&self, sizes: &[u64]) -> Result<Vec<usize>, SpecError> {
        let (fragments, tables) = (self.fragments(), sizes.len());
        if fragments > tables {
            let why = format!(
                "fragments = {fragments}: expected at most {tables}, as many as the model has tables"
            );
            return Err(SpecError::Parameter { component: "steps".into(), why });
        }
        // The largest first, each to the fragment with the least.
        let mut order: Vec<usize> = (0..tables).collect();
        order.sort_by_key(|table| (std::cmp::Reverse(sizes[*table]), *table));
        let (mut loads, mut dealt) = (vec![(0, 0); fragments], vec![0; tables]);
        for table in order {
            let least = (0..fragments).min_by_key(|fragment| loads[*fragment]).expect("there is a fragment");
            // Tables of no elements count too: no fragment stays empty.
            loads[least] = (loads[least].0 + sizes[table], loads[least].1 + 1);
            dealt[table] = least;
        }
        Ok(dealt)
    }

    /// The step within a clock after which a fragment is pushed, from 1 to h.
    fn turn(&self, fragment: usize) -> u64 {
        (fragment as u64 + 1) * self.h / self.fragments
    }

    /// The step within its clock, from 1 to h, of the last of so many steps of the job; 0 before the first.
    fn place(&self, steps: u64) -> u64 {
        if steps == 0 { 0 } else { (steps - 1) % self.h + 1 }
    }
}

impl fmt::Display for LocalSteps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "steps:h={}", self.h)?;
        if self.fragments != 1 {
            write!(f, ",fragments={}", self.fragments)?;
        }
        if self.late != 0 {
            write!(f, ",late={}", self.late)?;
        }
        self.inner.iter().try_for_each(|inner| write!(f, ",inner=({inner})"))
    }
}

/// The optimizer of workers that a text names.
pub fn inner_optimizer(registry: &Registry, text: &str) -> Result<OptimizerPolicy, SpecError> {
    let inner = OptimizerPolicy::parse(&registry.optimizer, text)?;
    if inner.assigns() {
        let why =
            format!("inner = {text}: parameters become what is pushed, which is no step; use sgd or adam");
        return Err(SpecError::Parameter { component: "steps".into(), why });
    }
    Ok(inner)
}

fn unwrapped(text: &str) -> &str {
    text.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')).unwrap_or(text).trim()
}

/// A worker's state for one table beside its parameters: the parameters of its last synchronisation, and the inner optimizer's state.
#[derive(Debug)]
pub struct Replica {
    /// The parameters of the last answer; from a push until its answer, the parameters that were pushed.
    anchor: Vec<f32>,
    slots: Vec<Vec<f32>>,
    steps: u64,
}

impl Replica {
    /// The replica of a table with the parameters that the servers have.
    pub fn new(parameters: &[f32], inner: &OptimizerPolicy) -> Replica {
        let slots = vec![vec![0.0; parameters.len()]; inner.slots()];
        Replica { anchor: parameters.to_vec(), slots, steps: 0 }
    }

    /// Steps by a gradient of this worker. Schedules of the learning rate follow `step`, the job's; the rule counts those that it
    /// made itself.
    pub fn step(&mut self, inner: &OptimizerPolicy, step: u64, parameters: &mut [f32], gradient: &[f32]) {
        self.steps += 1;
        let norm =
            |values: &[f32]| if inner.needs_norms() { kernels::squared_norm(values).sqrt() } else { 0.0 };
        let input = StepInput {
            version: step,
            t: self.steps,
            scale: 1.0,
            lr_factor: 1.0,
            parameter_norm: norm(parameters),
            gradient_norm: norm(gradient),
        };
        let mut slots: Vec<&mut [f32]> = self.slots.iter_mut().map(Vec::as_mut_slice).collect();
        inner.step(input, parameters, gradient, &mut slots);
    }

    /// The pseudo-gradient. It counts as pushed: the next one begins with the answer, and with what is changed from here on.
    pub fn pseudo_gradient(&mut self, parameters: &[f32], pseudo: &mut Vec<f32>) {
        assert_eq!(parameters.len(), self.anchor.len(), "a replica has its table's length");
        pseudo.clear();
        pseudo.extend(self.anchor.iter().zip(parameters).map(|(anchor, now)| anchor - now));
        self.anchor.copy_from_slice(parameters);
    }

    /// Takes the answer to the last push. What was changed since that push stays changed, and goes with the next one.
    pub fn merge(&mut self, parameters: &mut [f32], answer: &[f32]) {
        assert_eq!(
            (parameters.len(), answer.len()),
            (self.anchor.len(), self.anchor.len()),
            "lengths of a table"
        );
        for ((now, anchor), answer) in parameters.iter_mut().zip(&mut self.anchor).zip(answer) {
            // Exactly the answer where nothing was changed.
            *now = answer + (*now - *anchor);
            *anchor = *answer;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<Option<LocalSteps>, SpecError> {
        LocalSteps::parse(&Registry::builtin(), text)
    }

    fn steps(text: &str) -> LocalSteps {
        parse(text).unwrap().unwrap()
    }

    #[test]
    fn texts_are_read_and_given_back() {
        assert_eq!(parse("none"), Ok(None));
        for (text, shown) in [
            ("steps:h=50", "steps:h=50"),
            ("steps:h=50,fragments=1,late=0", "steps:h=50"),
            ("steps:late=2,h=8,fragments=4", "steps:h=8,fragments=4,late=2"),
            ("steps:h=8,inner=sgd:lr=0.1", "steps:h=8,inner=(sgd:lr=0.1)"),
            ("steps:h=8,inner=(adam:lr=0.1,beta1=0.8)", "steps:h=8,inner=(adam:lr=0.1,beta1=0.8)"),
        ] {
            assert_eq!(steps(text).to_string(), shown);
            assert_eq!(steps(shown), steps(text));
        }
        assert_eq!(steps("steps:h=8,inner=(sgd:lr=0.1)").inner(), Some("sgd:lr=0.1"));
    }

    #[test]
    fn what_cannot_work_is_refused_with_what_was_expected() {
        for (text, expected) in [
            ("step:h=3", "local: `step:h=3`: expected none, or steps:h=50"),
            ("none:h=3", "expected none, or steps"),
            ("steps", "missing field `h`, such as in `steps:h=50`"),
            ("steps:h=0", "h = 0: expected 1 to 1000000 steps"),
            ("steps:h=2000000", "h = 2000000: expected 1 to"),
            ("steps:h=4,fragments=5", "fragments = 5: expected 1 to 4"),
            ("steps:h=4,fragments=0", "fragments = 0: expected 1 to 4"),
            ("steps:h=4,late=4", "late = 4: expected less than h = 4"),
            ("steps:h=4,lat=4", "unknown field `lat`"),
            ("steps:h=4,inner=sdg", "unknown optimizer `sdg`"),
            ("steps:h=4,inner=(assign)", "inner = assign: parameters become what is pushed"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn fragments_have_their_turns_spread_over_a_clock() {
        let pushed = |text: &str, until| -> Vec<(u64, usize)> {
            let local = steps(text);
            (0..=until).filter_map(|made| Some((made, local.pushed_after(made)?))).collect()
        };
        assert_eq!(pushed("steps:h=4", 9), [(4, 0), (8, 0)]);
        assert_eq!(pushed("steps:h=8,fragments=4", 10), [(2, 0), (4, 1), (6, 2), (8, 3), (10, 0)]);
        assert_eq!(pushed("steps:h=5,fragments=2", 10), [(2, 0), (5, 1), (7, 0), (10, 1)]);
        let late = steps("steps:h=4,fragments=2,late=3");
        let merged: Vec<_> = (0..=9).filter_map(|made| Some((made, late.merged_after(made)?))).collect();
        assert_eq!(merged, [(5, 0), (7, 1), (9, 0)]);
        assert_eq!((late.first_step(3), late.turns_after(4), late.turns_after(0)), (12, true, false));
    }

    proptest! {
        /// Whatever the numbers: each fragment is pushed once in each clock, merged before its next push, and what is changed after
        /// its last push is pushed at the end, once.
        #[test]
        fn every_step_of_every_fragment_is_pushed_once(
            h in 1u64..20, fragments in 1u64..20, late in 0u64..20, total in 0u64..100,
        ) {
            prop_assume!(fragments <= h && late < h);
            let local = LocalSteps { h, fragments, late, inner: None };
            let count = local.fragments();
            let (mut unpushed, mut in_flight) = (vec![0u64; count], vec![false; count]);
            let (mut clock, mut seen) = (0, vec![0u64; count]);
            for made in 1..=total {
                unpushed.iter_mut().for_each(|steps| *steps += 1);
                // An answer that is merged without delay follows its own push.
                let merged = local.merged_after(made).filter(|_| late > 0);
                if let Some(fragment) = merged {
                    prop_assert!(std::mem::take(&mut in_flight[fragment]));
                }
                if let Some(fragment) = local.pushed_after(made) {
                    prop_assert!(!in_flight[fragment]);
                    in_flight[fragment] = late > 0;
                    unpushed[fragment] = 0;
                    seen[fragment] += 1;
                    prop_assert_eq!(seen[fragment], clock + 1);
                }
                clock += u64::from(local.turns_after(made));
            }
            let (first, clocks) = local.closing(total);
            prop_assert_eq!(first, clock);
            for (fragments, number) in clocks.iter().zip(first..) {
                for fragment in fragments {
                    prop_assert!(std::mem::take(&mut unpushed[*fragment]) > 0, "{} is not changed", fragment);
                    prop_assert!(seen[*fragment] <= number, "{} was pushed in clock {}", fragment, number);
                    seen[*fragment] = number + 1;
                }
            }
            prop_assert!(unpushed.iter().all(|steps| *steps == 0), "{:?}", unpushed);
        }
    }

    #[test]
    fn tables_are_dealt_evenly_and_whole() {
        let dealt = |text: &str, sizes: &[u64]| steps(text).deal(sizes);
        assert_eq!(dealt("steps:h=4", &[5, 0, 9]), Ok(vec![0, 0, 0]));
        assert_eq!(dealt("steps:h=4,fragments=2", &[3, 9, 4, 2]), Ok(vec![1, 0, 1, 1]));
        assert_eq!(dealt("steps:h=4,fragments=3", &[0, 0, 7]), Ok(vec![1, 2, 0]));
        let error = dealt("steps:h=4,fragments=3", &[1, 1]).unwrap_err().to_string();
        assert_eq!(error, "steps: fragments = 3: expected at most 2, as many as the model has tables");
    }

    /// With h = 1, inner SGD and an outer step of 1 a round is one of synchronous SGD, to rounding.
    #[test]
    fn a_synchronisation_after_every_step_is_synchronous_sgd() {
        let registry = Registry::builtin();
        let inner = inner_optimizer(&registry, "sgd:lr=0.25").unwrap();
        let outer = inner_optimizer(&registry, "sgd:lr=1").unwrap();
        let gradients = [[1.0f32, -2.0, 0.5], [0.25, 4.0, -1.0]];
        let start = [0.1f32, 0.2, 0.3];
        let (mut served, mut plain) = (start, start);
        let mut workers: Vec<(Replica, [f32; 3])> =
            gradients.iter().map(|_| (Replica::new(&start, &inner), start)).collect();
        for step in 0..5 {
            let (mut sum, mut pseudo, mut mean) = ([0.0; 3], Vec::new(), [0.0f32; 3]);
            for ((replica, parameters), gradient) in workers.iter_mut().zip(&gradients) {
                replica.step(&inner, step, parameters, gradient);
                replica.pseudo_gradient(parameters, &mut pseudo);
                kernels::add(&mut sum, &pseudo);
                kernels::add(&mut mean, gradient);
            }
            let input = StepInput {
                version: 0,
                t: 1,
                scale: 0.5,
                lr_factor: 1.0,
                parameter_norm: 0.0,
                gradient_norm: 0.0,
            };
            outer.step(input, &mut served, &sum, &mut []);
            inner.step(input, &mut plain, &mean, &mut []);
            for (replica, parameters) in &mut workers {
                replica.merge(parameters, &served);
                assert_eq!(*parameters, served);
            }
        }
        let differ = served.iter().zip(&plain).any(|(local, plain)| (local - plain).abs() > 1e-6);
        assert!(!differ && served != start, "{served:?}, {plain:?}");
    }

    /// Steps made between a push and its late answer are in the parameters afterwards, and in the next pseudo-gradient.
    #[test]
    fn a_late_answer_loses_no_step() {
        let inner = inner_optimizer(&Registry::builtin(), "sgd:lr=1").unwrap();
        let (mut parameters, mut pseudo) = ([8.0f32], Vec::new());
        let mut replica = Replica::new(&parameters, &inner);
        replica.step(&inner, 0, &mut parameters, &[1.0]);
        replica.pseudo_gradient(&parameters, &mut pseudo);
        assert_eq!((pseudo[0], parameters), (1.0, [7.0]));
        replica.step(&inner, 1, &mut parameters, &[2.0]);
        // The servers moved by the mean of several workers.
        replica.merge(&mut parameters, &[6.0]);
        assert_eq!(parameters, [4.0]);
        replica.pseudo_gradient(&parameters, &mut pseudo);
        assert_eq!(pseudo, [2.0]);
    }

    /// Norms are those of the table, as on the servers.
    #[test]
    fn inner_optimizers_may_use_norms() {
        let inner = inner_optimizer(&Registry::builtin(), "sgd:lr=1,clip=1").unwrap();
        let mut parameters = [0.0f32, 0.0];
        Replica::new(&parameters, &inner).step(&inner, 0, &mut parameters, &[3.0, 4.0]);
        assert!((parameters[0] + 0.6).abs() < 1e-6 && (parameters[1] + 0.8).abs() < 1e-6, "{parameters:?}");
    }
}
