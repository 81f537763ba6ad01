//! Trains a workload in one loop without any server, for figures to compare a cluster with.
//!
//! `cargo run --release -p paramill-train --example solo -- cnn --data FOLDER --workers 2 --epochs 2`

#![allow(clippy::disallowed_macros, reason = "it has nothing else to say, and nothing to lose")]

#[path = "../tests/reference/mod.rs"]
mod reference;

use paramill_train::{WorkloadConfig, find};
use reference::{Reference, Rule};
use std::time::Instant;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_else(|| "mlp".into());
    let info = find(&name)?;
    let mut config = WorkloadConfig::new(&name)?;
    let (mut epochs, mut rule, mut waiting) = (info.epochs, parse_rule(info.optimizer)?, true);
    while let Some(flag) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{flag} needs a value"));
        match flag.as_str() {
            "--data" => config.data = Some(value()?.into()),
            "--test" => config.test = Some(value()?.into()),
            "--workers" => config.workers = value()?.parse()?,
            "--batch" => config.batch = value()?.parse()?,
            "--seed" => config.seed = value()?.parse()?,
            "--examples" => config.examples = Some(value()?.parse()?),
            "--hidden" => config.hidden = value()?.parse()?,
            "--factors" => config.factors = value()?.parse()?,
            "--l2" => config.l2 = Some(value()?.parse()?),
            "--epochs" => epochs = value()?.parse()?,
            "--optimizer" => rule = parse_rule(&value()?)?,
            "--asp" => waiting = false,
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }

    let start = Instant::now();
    let mut reference = Reference::new(&config, rule);
    println!(
        "{name}, {rule:?}, {} workers, batch {}: loaded in {:.1?}",
        config.workers,
        config.batch,
        start.elapsed()
    );
    for epoch in 0..epochs {
        let start = Instant::now();
        let loss = if waiting { reference.epoch(epoch) } else { reference.epoch_without_waiting(epoch) };
        let trained = start.elapsed();
        let judged = reference.evaluate();
        println!(
            "epoch {epoch}: loss {loss:.4} in {trained:.1?}; held out: loss {:.4}, {} {:.4} {:?}",
            judged.loss, judged.metric, judged.value, judged.extra
        );
    }
    Ok(())
}

fn parse_rule(text: &str) -> Result<Rule, Failure> {
    let (name, lr) = text.split_once(":lr=").ok_or("an optimizer is written `name:lr=0.1`")?;
    let lr = lr.parse()?;
    Ok(match name {
        "sgd" => Rule::Sgd(lr),
        "momentum" => Rule::Momentum(lr),
        "adagrad" => Rule::AdaGrad(lr),
        "adam" => Rule::Adam(lr),
        _ => return Err(format!("no rule {name} here").into()),
    })
}
