//! Known answers: ten steps of each rule beside a scalar twin (the same bits) and the textbook formula in f64 (close).

use paramill_core::optimizer::{OptimizerPolicy, StepInput};
use paramill_core::prng::Prng;
use paramill_core::registry::Registry;
use proptest::prelude::*;

/// What a rule knows when it changes one parameter.
#[derive(Clone, Copy)]
struct Scalars<T> {
    lr: T,
    t: i32,
    scale: T,
    weight_decay: T,
    parameter_norm: T,
    gradient_norm: T,
}

/// One parameter, one gradient, two state values.
type Rule<T> = fn(&Scalars<T>, w: &mut T, g: T, state: &mut [T; 2]);

struct Case {
    text: &'static str,
    weight_decay: f32,
    twin: Rule<f32>,
    textbook: Rule<f64>,
}

const CASES: [Case; 9] = [
    Case {
        text: "sgd:lr=0.1,weight_decay=0.01",
        weight_decay: 0.01,
        twin: |s, w, g, _| {
            let g = s.scale * g + s.weight_decay * *w;
            *w -= s.lr * g;
        },
        textbook: |s, w, g, _| *w = *w * (1.0 - s.lr * s.weight_decay) - s.lr * s.scale * g,
    },
    Case {
        text: "momentum:lr=0.1,weight_decay=0.01,beta=0.8",
        weight_decay: 0.01,
        twin: |s, w, g, [v, _]| {
            let g = s.scale * g + s.weight_decay * *w;
            *v = 0.8 * *v + g;
            *w -= s.lr * *v;
        },
        textbook: |s, w, g, [v, _]| {
            *v = 0.8 * *v + s.scale * g + s.weight_decay * *w;
            *w -= s.lr * *v;
        },
    },
    Case {
        text: "nesterov:lr=0.1,weight_decay=0.01,beta=0.8",
        weight_decay: 0.01,
        twin: |s, w, g, [v, _]| {
            let g = s.scale * g + s.weight_decay * *w;
            *v = 0.8 * *v + g;
            *w -= s.lr * (g + 0.8 * *v);
        },
        // Written with the old velocity: w -= lr * ((1 + beta) * g + beta^2 * v).
        textbook: |s, w, g, [v, _]| {
            let g = s.scale * g + s.weight_decay * *w;
            *w -= s.lr * (1.8 * g + 0.64 * *v);
            *v = 0.8 * *v + g;
        },
    },
    Case {
        text: "adagrad:lr=0.1,weight_decay=0.01,epsilon=1e-6",
        weight_decay: 0.01,
        twin: |s, w, g, [a, _]| {
            let g = s.scale * g + s.weight_decay * *w;
            *a += g * g;
            *w -= s.lr * g / (a.sqrt() + 1e-6);
        },
        textbook: |s, w, g, [a, _]| {
            let g = s.scale * g + s.weight_decay * *w;
            *a += g.powi(2);
            *w -= s.lr / (a.sqrt() + 1e-6) * g;
        },
    },
    Case {
        text: "rmsprop:lr=0.01,weight_decay=0.01,decay=0.8,epsilon=1e-6",
        weight_decay: 0.01,
        twin: |s, w, g, [a, _]| {
            let g = s.scale * g + s.weight_decay * *w;
            *a = 0.8 * *a + (1.0 - 0.8) * (g * g);
            *w -= s.lr * g / (a.sqrt() + 1e-6);
        },
        textbook: |s, w, g, [a, _]| {
            let g = s.scale * g + s.weight_decay * *w;
            *a += 0.2 * (g.powi(2) - *a);
            *w -= s.lr / (a.sqrt() + 1e-6) * g;
        },
    },
    Case {
        text: "adam:lr=0.01,weight_decay=0.01,beta1=0.8,beta2=0.9,epsilon=1e-6",
        weight_decay: 0.01,
        twin: |s, w, g, state| adam_twin(s, s.scale * g + s.weight_decay * *w, 1.0, w, state),
        textbook: |s, w, g, state| adam_textbook(s, s.scale * g + s.weight_decay * *w, w, state),
    },
    Case {
        text: "adamw:lr=0.01,weight_decay=0.01,beta1=0.8,beta2=0.9,epsilon=1e-6",
        weight_decay: 0.01,
        twin: |s, w, g, state| adam_twin(s, s.scale * g, 1.0 - s.lr * s.weight_decay, w, state),
        textbook: |s, w, g, state| {
            let decay = s.lr * s.weight_decay * *w;
            adam_textbook(s, s.scale * g, w, state);
            *w -= decay;
        },
    },
    Case {
        text: "lars:lr=0.5,weight_decay=0.01,beta=0.8,trust=0.01",
        weight_decay: 0.01,
        twin: |s, w, g, [v, _]| {
            let lr = s.lr * (0.01 * s.parameter_norm / (s.gradient_norm + s.weight_decay * s.parameter_norm));
            let g = s.scale * g + s.weight_decay * *w;
            *v = 0.8 * *v + lr * g;
            *w -= *v;
        },
        textbook: |s, w, g, [v, _]| {
            let trust = 0.01 * s.parameter_norm / (s.gradient_norm + s.weight_decay * s.parameter_norm);
            *v = 0.8 * *v + s.lr * trust * (s.scale * g + s.weight_decay * *w);
            *w -= *v;
        },
    },
    Case {
        text: "assign:lr=0.25,weight_decay=0.01",
        weight_decay: 0.01,
        twin: |s, w, g, _| {
            let value = s.scale * g - s.weight_decay * *w;
            *w += s.lr * (value - *w);
        },
        textbook: |s, w, g, _| *w = (1.0 - s.lr) * *w + s.lr * (s.scale * g - s.weight_decay * *w),
    },
];

fn adam_twin(s: &Scalars<f32>, g: f32, shrink: f32, w: &mut f32, [m, v]: &mut [f32; 2]) {
    let power = |beta: f32| repeated_squaring(f64::from(beta), s.t as u32);
    let lr = (f64::from(s.lr) / (1.0 - power(0.8))) as f32;
    let square = (1.0 / (1.0 - power(0.9))) as f32;
    *m = 0.8 * *m + (1.0 - 0.8) * g;
    *v = 0.9 * *v + (1.0 - 0.9) * (g * g);
    *w = shrink * *w - lr * *m / ((square * *v).sqrt() + 1e-6);
}

/// The order of multiplications is part of the twin: another one may differ in the last bit.
fn repeated_squaring(base: f64, exponent: u32) -> f64 {
    let mut result = 1.0;
    for bit in 0..8 {
        if exponent & (1 << bit) != 0 {
            result *= (0..bit).fold(base, |square, _| square * square);
        }
    }
    result
}

fn adam_textbook(s: &Scalars<f64>, g: f64, w: &mut f64, [m, v]: &mut [f64; 2]) {
    *m = 0.8 * *m + 0.2 * g;
    *v = 0.9 * *v + 0.1 * g.powi(2);
    let (mean, square) = (*m / (1.0 - 0.8f64.powi(s.t)), *v / (1.0 - 0.9f64.powi(s.t)));
    *w -= s.lr * mean / (square.sqrt() + 1e-6);
}

#[test]
fn every_builtin_rule_has_a_case() {
    let registry = Registry::builtin();
    let names: Vec<&str> = registry.optimizer.entries().iter().map(|entry| entry.name).collect();
    let tested: Vec<&str> = CASES.iter().map(|case| case.text.split(':').next().unwrap()).collect();
    assert_eq!(names, tested);
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

proptest! {
    #[test]
    fn ten_steps_are_the_twin_and_near_the_textbook(len in 1usize..100, seed: u64) {
        for case in &CASES {
            check_ten_steps(case, len, seed);
        }
    }
}

/// The square of a gradient of 1e30 is no f32. Under an infinite mean of squares the parameter never moved again.
#[test]
fn a_gradient_whose_square_is_infinite_does_not_stop_its_parameter_for_ever() {
    for text in ["adam:lr=0.1", "adamw:lr=0.1", "rmsprop:lr=0.1", "adagrad:lr=0.1"] {
        let policy = OptimizerPolicy::parse(&Registry::builtin().optimizer, text).expect("a rule builds");
        let mut slots = vec![vec![0.0; 2]; policy.slots()];
        let mut w = [1.0, 1.0];
        let mut step = |t: u64, gradient: [f32; 2], w: &mut [f32; 2]| {
            let input = StepInput {
                version: t - 1,
                t,
                scale: 1.0,
                lr_factor: 1.0,
                parameter_norm: 0.0,
                gradient_norm: 0.0,
            };
            let mut slices: Vec<&mut [f32]> = slots.iter_mut().map(|slot| &mut slot[..]).collect();
            policy.step(input, w, &gradient, &mut slices);
        };
        step(1, [1e30, 1.0], &mut w);
        assert!(w[0] < 1.0 && w[0] > -1.0, "{text}: a step of the usual size, to {}", w[0]);
        assert!((w[0] - w[1]).abs() < 1e-4, "{text}: {} and {}, as far as 1 goes at first", w[0], w[1]);
        let after_first = w[0];
        step(2, [1e30, 1.0], &mut w);
        assert!(w[0].is_finite() && w[0] < after_first, "{text}: it moves on, to {}", w[0]);
        assert!(slots.iter().flatten().all(|value| value.is_finite()), "{text}: {slots:?}");
    }
}

/// Far enough that a gradient never cancels with the weight decay. A rule that divides by the size of what is left of both
/// makes a step of any length of it, and all of its digits are rounding errors.
fn away_from_zero(gradient: f32) -> f32 {
    gradient + 0.4f32.copysign(gradient)
}

fn check_ten_steps(case: &Case, len: usize, seed: u64) {
    let Case { text, weight_decay, twin, textbook } = case;
    let policy = OptimizerPolicy::parse(&Registry::builtin().optimizer, text).expect("a case builds");
    let mut prng = Prng::new(seed);
    let mut w: Vec<f32> = (0..len).map(|_| prng.normal() as f32).collect();
    let mut slots = vec![vec![0.0; len]; policy.slots()];
    let mut twins: Vec<(f32, [f32; 2])> = w.iter().map(|&w| (w, [0.0; 2])).collect();
    let mut textbooks: Vec<(f64, [f64; 2])> = w.iter().map(|&w| (f64::from(w), [0.0; 2])).collect();
    for t in 1..=10 {
        let gradient: Vec<f32> = (0..len).map(|_| away_from_zero(prng.normal() as f32)).collect();
        let input = StepInput {
            version: t - 1,
            t,
            scale: 0.25,
            lr_factor: 1.0,
            parameter_norm: norm(&w),
            gradient_norm: norm(&gradient),
        };
        let (lr, scaled_norm) = (policy.lr_at(t - 1), 0.25 * input.gradient_norm);
        let exact = Scalars {
            lr: f64::from(lr),
            t: t as i32,
            scale: 0.25,
            weight_decay: f64::from(*weight_decay),
            parameter_norm: input.parameter_norm,
            gradient_norm: scaled_norm,
        };
        let rounded = Scalars {
            lr,
            t: t as i32,
            scale: 0.25,
            weight_decay: *weight_decay,
            parameter_norm: input.parameter_norm as f32,
            gradient_norm: scaled_norm as f32,
        };
        let mut slices: Vec<&mut [f32]> = slots.iter_mut().map(|slot| &mut slot[..]).collect();
        policy.step(input, &mut w, &gradient, &mut slices);
        for (i, &g) in gradient.iter().enumerate() {
            let (scalar, state) = &mut twins[i];
            twin(&rounded, scalar, g, state);
            let (scalar, state) = &mut textbooks[i];
            textbook(&exact, scalar, f64::from(g), state);
        }
    }
    for i in 0..len {
        assert_eq!(w[i].to_bits(), twins[i].0.to_bits(), "{}: {} and {}", text, w[i], twins[i].0);
        for (slot, scalar) in slots.iter().zip(twins[i].1) {
            assert_eq!(slot[i].to_bits(), scalar.to_bits(), "{}: a slot", text);
        }
        let far = (f64::from(w[i]) - textbooks[i].0).abs();
        assert!(far < 1e-5 * (1.0 + textbooks[i].0.abs()), "{}: {} and {}", text, w[i], textbooks[i].0);
    }
}
