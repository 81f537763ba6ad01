//! What every registered optimizer must keep. A new rule is tested by being registered.

use paramill_core::kernels;
use paramill_core::optimizer::{Optimizer, OptimizerPolicy, StepInput};
use paramill_core::prng::Prng;
use paramill_core::registry::{Axis, Entry, Param, Registry};
use paramill_core::spec::Spec;
use proptest::prelude::*;

fn axis() -> Axis<dyn Optimizer> {
    Registry::builtin().optimizer
}

fn example(entry: &Entry<dyn Optimizer>) -> OptimizerPolicy {
    OptimizerPolicy::parse(&axis(), entry.example)
        .unwrap_or_else(|error| panic!("{}: {error}", entry.example))
}

/// A table with its state, as a server holds it.
#[derive(Debug, Clone, PartialEq)]
struct Table {
    parameters: Vec<f32>,
    slots: Vec<Vec<f32>>,
    steps: u64,
}

impl Table {
    fn new(policy: &OptimizerPolicy, parameters: Vec<f32>) -> Table {
        let slots = vec![vec![0.0; parameters.len()]; policy.slots()];
        Table { parameters, slots, steps: 0 }
    }

    /// One step on the whole table, carried out in pieces that end at `cuts`.
    fn step(&mut self, policy: &OptimizerPolicy, gradient: &[f32], cuts: &[usize]) {
        let input = StepInput {
            version: self.steps,
            t: self.steps + 1,
            scale: 0.5,
            lr_factor: 1.0,
            parameter_norm: kernels::squared_norm(&self.parameters).sqrt(),
            gradient_norm: kernels::squared_norm(gradient).sqrt(),
        };
        let mut start = 0;
        for &end in cuts.iter().chain([&gradient.len()]) {
            let mut slots: Vec<&mut [f32]> =
                self.slots.iter_mut().map(|slot| &mut slot[start..end]).collect();
            policy.step(input, &mut self.parameters[start..end], &gradient[start..end], &mut slots);
            start = end;
        }
        self.steps += 1;
    }

    fn bits(&self) -> Vec<u32> {
        self.slots.iter().flatten().chain(&self.parameters).map(|value| value.to_bits()).collect()
    }
}

#[test]
fn every_entry_is_described_and_its_example_builds() {
    for entry in axis().entries() {
        assert!(entry.about.ends_with('.'), "{}: {}", entry.name, entry.about);
        assert_eq!(Spec::parse(entry.example).unwrap().name, entry.name);
        example(entry);
    }
}

#[test]
fn the_text_form_comes_back() {
    for entry in axis().entries() {
        let text = example(entry).to_string();
        assert_eq!(OptimizerPolicy::parse(&axis(), &text).unwrap().to_string(), text);
    }
}

#[test]
fn an_unknown_parameter_is_refused_and_the_known_ones_are_listed() {
    let axis = axis();
    for entry in axis.entries() {
        let error =
            OptimizerPolicy::parse(&axis, &format!("{},colour=blue", entry.example)).unwrap_err().to_string();
        assert!(error.contains("`colour`"), "{error}");
        for param in axis.common.iter().chain(entry.params) {
            assert!(error.contains(param.name), "{error} does not list {}", param.name);
        }
        // The rule itself refuses it too, for those who build it without a policy.
        assert!((entry.build)(&Spec::parse(&format!("{}:colour=blue", entry.name)).unwrap()).is_err());
    }
}

#[test]
fn every_declared_parameter_is_accepted() {
    let axis = axis();
    for entry in axis.entries() {
        let given = Spec::parse(entry.example).unwrap();
        for param in axis.common.iter().chain(entry.params) {
            let from_example =
                || given.params.iter().find(|(key, _)| key == param.name).map(|(_, value)| value.as_str());
            let value = param.default.or_else(from_example).expect("a required parameter is in the example");
            let lr = if param.name == "lr" { "" } else { ",lr=1" };
            let text = format!("{}:{}={value}{lr}", entry.name, param.name);
            OptimizerPolicy::parse(&axis, &text).unwrap_or_else(|error| panic!("{text}: {error}"));
        }
    }
}

#[test]
fn declared_defaults_are_the_real_ones() {
    let axis = axis();
    for entry in axis.entries() {
        let is_own = |param: &&Param| axis.common.iter().all(|common| common.name != param.name);
        let own = entry.params.iter().filter(is_own);
        let explicit = own.map(|param| (param.name.into(), param.default.unwrap().into())).collect();
        let explicit = axis.build(&Spec { name: entry.name.into(), params: explicit }).unwrap();
        let implicit = axis.build(&Spec { name: entry.name.into(), params: Vec::new() }).unwrap();
        assert_eq!(format!("{explicit:?}"), format!("{implicit:?}"));

        // Only a learning rate may be without a default: then it must be given.
        let common = axis.params(entry).into_iter().filter(|param| !is_own(&param));
        let value = |param: &Param| match param.default {
            Some(default) => default,
            None if param.name == "lr" => "1",
            None => panic!("{}: {} has no default", entry.name, param.name),
        };
        let explicit: Vec<String> =
            common.clone().map(|param| format!("{}={}", param.name, value(&param))).collect();
        let required: Vec<String> = common
            .filter(|param| param.default.is_none())
            .map(|param| format!("{}={}", param.name, value(&param)))
            .collect();
        let parse = |params: &[String]| {
            OptimizerPolicy::parse(&axis, &format!("{}:{}", entry.name, params.join(","))).unwrap()
        };
        assert_eq!(parse(&explicit).parameters(), parse(&required).parameters());
        assert_eq!(parse(&explicit).to_string(), parse(&required).to_string());
    }
}

#[test]
fn a_zero_gradient_without_weight_decay_changes_nothing() {
    let axis = axis();
    for entry in axis.entries() {
        let text = format!("{}:lr=0.1,weight_decay=0", entry.name);
        let policy = OptimizerPolicy::parse(&axis, &text).unwrap();
        if policy.assigns() {
            continue;
        }
        let parameters = vec![1.5, -2.0, 0.0, 1e-30, 1e30];
        let mut table = Table::new(&policy, parameters.clone());
        for _ in 0..3 {
            table.step(&policy, &[0.0; 5], &[]);
        }
        assert_eq!(table.parameters, parameters, "{}", entry.name);
    }
}

/// Gradients here are sums of two.
#[test]
fn rules_that_assign_make_parameters_the_mean_of_what_was_pushed_to_the_bit() {
    let axis = axis();
    let assigning = axis.entries().iter().map(example).filter(OptimizerPolicy::assigns);
    for policy in assigning.collect::<Vec<_>>() {
        let mut table = Table::new(&policy, vec![1.5, -2.0, 0.0, 1e-30, 1e30]);
        for pushed in [[0.1, -0.0, 3.0, 1e-40, -7.0], [0.0; 5]] {
            table.step(&policy, &pushed, &[]);
            assert_eq!(
                table.parameters.iter().map(|w| w.to_bits()).collect::<Vec<_>>(),
                pushed.map(|value| (0.5 * value).to_bits())
            );
        }
    }
}

/// Half a squared distance, ten times steeper along every other axis.
#[test]
fn every_example_goes_down_a_bowl() {
    for entry in axis().entries() {
        let policy = example(entry);
        if policy.assigns() {
            continue;
        }
        let steepness = |i: usize| if i.is_multiple_of(2) { 1.0 } else { 10.0 };
        let target = |i: usize| 1.0 + i as f32 / 10.0;
        let loss = |w: &[f32]| -> f32 {
            w.iter().enumerate().map(|(i, w)| 0.5 * steepness(i) * (w - target(i)).powi(2)).sum()
        };
        let mut table = Table::new(&policy, vec![0.5; 10]);
        let before = loss(&table.parameters);
        for _ in 0..5000 {
            let gradient: Vec<f32> =
                table.parameters.iter().enumerate().map(|(i, w)| steepness(i) * (w - target(i))).collect();
            table.step(&policy, &gradient, &[]);
        }
        let after = loss(&table.parameters);
        assert!(after < 0.01 * before, "{}: {before} to {after}", entry.name);
    }
}

proptest! {
    #[test]
    fn pieces_are_bit_identical_to_the_whole(
        len in 1usize..200,
        mut cuts in prop::collection::vec(0usize..200, 0..6),
        seed: u64,
    ) {
        cuts.iter_mut().for_each(|cut| *cut %= len);
        cuts.sort_unstable();
        for entry in axis().entries() {
            let policy = example(entry);
            let mut prng = Prng::new(seed);
            let mut draw = || (0..len).map(|_| prng.normal() as f32).collect::<Vec<f32>>();
            let mut whole = Table::new(&policy, draw());
            let mut cut = whole.clone();
            for _ in 0..4 {
                let gradient = draw();
                whole.step(&policy, &gradient, &[]);
                cut.step(&policy, &gradient, &cuts);
            }
            prop_assert_eq!(whole.bits(), cut.bits(), "{}", entry.name);
        }
    }

    #[test]
    fn finite_input_gives_finite_output(
        values in prop::collection::vec((-1e6f32..1e6, -1e6f32..1e6), 1..50),
        clip in prop::option::of(0.1f32..10.0),
    ) {
        let (parameters, gradient): (Vec<f32>, Vec<f32>) = values.into_iter().unzip();
        let clip = clip.map_or(String::new(), |clip| format!(",clip={clip}"));
        for entry in axis().entries() {
            let policy = OptimizerPolicy::parse(&axis(), &format!("{}{clip}", entry.example)).unwrap();
            let mut table = Table::new(&policy, parameters.clone());
            for _ in 0..5 {
                table.step(&policy, &gradient, &[]);
            }
            let all = table.slots.iter().flatten().chain(&table.parameters);
            prop_assert!(all.clone().all(|value| value.is_finite()), "{}: {:?}", entry.name, table);
        }
    }

    #[test]
    fn the_same_steps_give_the_same_bits(seed: u64, len in 1usize..100) {
        for entry in axis().entries() {
            let run = || {
                let policy = example(entry);
                let mut prng = Prng::new(seed);
                let mut table = Table::new(&policy, (0..len).map(|_| prng.normal() as f32).collect());
                for _ in 0..3 {
                    let gradient: Vec<f32> = (0..len).map(|_| prng.normal() as f32).collect();
                    table.step(&policy, &gradient, &[]);
                }
                table.bits()
            };
            prop_assert_eq!(run(), run());
        }
    }
}
