//! Every registered consistency model is judged by the same suite.

use paramill_core::consistency::{Admit, Apply, Consistency, Controller, PullOutcome, SyncPolicy, axis};
use paramill_core::registry::Entry;
use paramill_core::spec::{Spec, SpecError};
use paramill_core::types::{Time, WorkerId};

fn parse(text: &str) -> Result<SyncPolicy, SpecError> {
    SyncPolicy::parse(&axis(), text)
}

/// The example with one parameter set, replaced where it is given.
fn with(entry: &Entry<dyn Consistency>, name: &str, value: &str) -> String {
    let mut spec = Spec::parse(entry.example).expect("an example can be read");
    spec.take(name);
    spec.params.push((name.into(), value.into()));
    spec.to_string()
}

#[test]
fn an_example_builds_and_prints_itself() {
    assert!(axis().entries().len() >= 8, "models are missing");
    for entry in axis().entries() {
        let policy = parse(entry.example).unwrap_or_else(|error| panic!("{}: {error}", entry.name));
        assert_eq!(policy.to_string(), entry.example);
        let soft = with(entry, "exec", "soft");
        assert_eq!(parse(&soft).unwrap().to_string(), soft);
    }
}

#[test]
fn unknown_parameters_are_refused_and_the_known_ones_listed() {
    for entry in axis().entries() {
        let error = parse(&with(entry, "nonsense", "1")).unwrap_err().to_string();
        assert!(error.contains("unknown field `nonsense`"), "{}: {error}", entry.name);
        // What the component takes and what the manual says it takes are the same.
        let taken: Vec<&str> = error.split('`').skip(3).step_by(2).collect();
        let declared: Vec<&str> = entry.params.iter().map(|param| param.name).collect();
        assert_eq!(taken, declared, "{}: {error}", entry.name);
    }
}

#[test]
fn declared_defaults_are_accepted() {
    for entry in axis().entries() {
        let params = axis().common.iter().chain(entry.params);
        for param in params {
            let Some(default) = param.default else { continue };
            let text = with(entry, param.name, default);
            assert!(parse(&text).is_ok(), "{text}: {:?}", parse(&text));
        }
    }
}

#[test]
fn texts_are_sentences() {
    for entry in axis().entries() {
        let abouts = entry.params.iter().map(|param| param.about).chain([entry.about]);
        for about in abouts {
            assert!(about.ends_with('.') && !about.contains('\n'), "{}: {about}", entry.name);
        }
    }
}

#[test]
fn a_full_round_of_one_gradient_each_is_not_scaled() {
    for entry in axis().entries() {
        let model = parse(entry.example).unwrap().model;
        assert!((1..=64).all(|n| model.lr_factor(n, n) == 1.0), "{}", entry.name);
    }
}

#[test]
fn what_is_not_late_weighs_one_and_what_is_late_weighs_something() {
    for entry in axis().entries() {
        let model = parse(entry.example).unwrap().model;
        assert_eq!(model.late_weight(0), 1.0, "{}", entry.name);
        assert!(
            (1..100).all(|late| (f32::MIN_POSITIVE..=1.0).contains(&model.late_weight(late))),
            "{}",
            entry.name
        );
    }
}

#[test]
fn iterations_are_left_out_only_where_rounds_make_steps_and_close_without_some() {
    for entry in axis().entries() {
        let model = parse(entry.example).unwrap().model;
        if model.catches_up() {
            assert_eq!(model.apply(), Apply::OnRound, "{}", entry.name);
            assert!(!model.waits_for_all(), "{}", entry.name);
        }
    }
}

#[test]
fn admission_follows_from_how_gradients_are_applied() {
    for entry in axis().entries() {
        let model = parse(entry.example).unwrap().model;
        for (clock, v_train) in [(0, 0), (3, 5), (5, 5), (7, 5)] {
            let admit = model.admit(clock, v_train);
            let fits = match model.apply() {
                Apply::OnArrival => admit == Admit::Now,
                Apply::OnRound if clock < v_train => matches!(admit, Admit::Late | Admit::Round(5)),
                Apply::OnRound => matches!(admit, Admit::Round(round) if (v_train..=clock).contains(&round)),
            };
            assert!(fits, "{}: clock {clock} at version {v_train} is {admit:?}", entry.name);
        }
    }
}

/// Three workers of different speeds that push, pull, and wait for the answer: all of them get through.
#[test]
fn everybody_makes_progress() {
    const ITERATIONS: u64 = 30;
    for entry in axis().entries() {
        for exec in ["lazy", "soft"] {
            let text = with(entry, "exec", exec);
            let mut controller = Controller::new(parse(&text).unwrap(), (0..3).map(WorkerId), 5);
            let (mut clocks, mut blocked) = ([0u64; 3], [false; 3]);
            let mut now = Time::ZERO;
            for turn in 0..1000u64 {
                now = Time(turn * 1_000_000);
                for rank in 0..3usize {
                    // Rank 1 is half as fast as rank 0, rank 2 a third.
                    if blocked[rank] || clocks[rank] >= ITERATIONS || turn % (rank as u64 + 1) != 0 {
                        continue;
                    }
                    let worker = WorkerId(rank as u32);
                    let admit = controller.admit(worker, clocks[rank]);
                    controller.push(now, worker, clocks[rank], admit, Some(0.5), 1);
                    clocks[rank] += 1;
                    while controller.advance(now).is_some() {}
                    blocked[rank] = controller.pull(now, worker, clocks[rank], 0) == PullOutcome::Wait;
                    while let Some(released) = controller.poll_released() {
                        blocked[released.worker.0 as usize] = false;
                    }
                }
            }
            assert_eq!(clocks, [ITERATIONS; 3], "{text}");
            assert_eq!(controller.state().v_train(), ITERATIONS, "{text}");
            assert_eq!((controller.waiting().count(), blocked), (0, [false; 3]), "{text}");
            assert_eq!(controller.next_timeout().filter(|&timeout| timeout < now), None, "{text}");
        }
    }
}
