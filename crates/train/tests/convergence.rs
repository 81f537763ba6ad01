//! Every workload, trained by a reference loop with several workers, comes close to the known answer of made data.

mod reference;

use paramill_train::{WorkloadConfig, generate};
use reference::{Reference, Rule};

fn config(name: &str, workers: u32, examples: usize) -> WorkloadConfig {
    let mut config = WorkloadConfig::new(name).expect("a known workload");
    (config.workers, config.examples) = (workers, Some(examples));
    config
}

#[test]
fn lr_finds_nearly_the_true_model_with_and_without_waiting() {
    let config = config("lr", 4, 20_000);
    let best = generate::sparse_examples(config.seed, 20_000).best_auc();
    let mut lockstep = Reference::new(&config, Rule::AdaGrad(0.1));
    let mut free = Reference::new(&config, Rule::AdaGrad(0.1));
    for epoch in 0..5 {
        lockstep.epoch(epoch);
        free.epoch_without_waiting(epoch);
    }
    for reached in [lockstep.evaluate(), free.evaluate()] {
        assert_eq!(reached.metric, "auc");
        assert!(reached.value > best - 0.01, "{reached:?}, the true model {best}");
        assert!(reached.value < best + 0.01, "{reached:?}, the true model {best}");
        assert!(reached.extra.iter().any(|(name, value)| name == "accuracy" && *value > 0.8), "{reached:?}");
    }
}

#[test]
fn mf_comes_down_to_the_noise() {
    let mut config = config("mf", 4, 40_000);
    config.factors = 6;
    // The data has little noise and much of it is known, so that little needs to be held back.
    config.l2 = Some(0.02);
    let best = generate::ratings(config.seed, 40_000).best_rmse;
    let mut training = Reference::new(&config, Rule::AdaGrad(0.1));
    let before = training.evaluate().value;
    for epoch in 0..12 {
        training.epoch(epoch);
    }
    let reached = training.evaluate().value;
    assert!(before > 2.0 * best && reached < 1.15 * best, "{before}, then {reached}; the noise is {best}");
}

#[test]
fn mlp_recognises_the_prototypes() {
    let mut config = config("mlp", 4, 2_000);
    config.hidden = 32;
    let mut training = Reference::new(&config, Rule::Momentum(0.05));
    for epoch in 0..6 {
        training.epoch(epoch);
    }
    let reached = training.evaluate().value;
    assert!(reached > 0.8, "{reached}");
}

#[test]
fn cnn_recognises_the_prototypes() {
    let mut config = config("cnn", 2, 1_000);
    (config.hidden, config.batch) = (32, 16);
    let mut training = Reference::new(&config, Rule::Adam(0.003));
    let first = training.epoch(0);
    let second = training.epoch(1);
    let reached = training.evaluate().value;
    assert!(second < first && reached > 0.6, "loss {first}, then {second}; accuracy {reached}");
}

#[test]
fn plain_sgd_goes_down_too() {
    let config = config("lr", 2, 2_000);
    let mut training = Reference::new(&config, Rule::Sgd(0.5));
    let first = training.epoch(0);
    let last = (1..5).map(|epoch| training.epoch(epoch)).last().unwrap();
    assert!(last < 0.9 * first, "{first}, then {last}");
}
