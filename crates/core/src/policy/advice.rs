//! Policies that work, each by itself, and are known to train badly together.

use super::Policy;
use crate::codec::{Codec, Kind};
use crate::limits;
use crate::optimizer::OptimizerPolicy;
use crate::registry::Registry;
use crate::spec::{Spec, split_outside_parentheses};

/// The part of a gradient's norm that a codec must be able to hold back to be thought of as late. Residuals of rounding are far
/// below it.
const LATE: f64 = 0.5;

/// A sentence about policies that train badly together, and the optimizer that does better.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// The combination and its effect.
    pub why: String,
    /// The optimizer to take instead, in text form.
    pub optimizer: String,
}

impl Advice {
    /// What is to be said against policies. A policy that cannot be read has its error, and no advice.
    ///
    /// A sparsifier that sends a share of the entries keeps the others until they have grown. They arrive late and at once.
    /// Momentum goes on moving by such an entry for many steps, in which workers keep more of the same, because they do not
    /// see the end of the move: it goes too far.
    pub fn on(policy: &Policy, registry: &Registry) -> Option<Advice> {
        let codec = policy.codecs(registry).ok()?.push;
        let optimizer = policy.optimizer(registry).ok()?;
        // Pseudo-gradients are the way from one point to another: further than 1 is beyond the mean of the workers.
        let instead = optimizer.without_inertia(policy.is_local().then_some(1.0))?;
        if !is_late(&codec, registry) {
            return None;
        }
        let why = format!(
            "`{codec}` sends most of a gradient late, and the momentum of `{optimizer}` on the servers prolongs what comes \
             late, which costs accuracy"
        );
        debug_assert!(
            OptimizerPolicy::parse(&registry.optimizer, &instead).is_ok_and(|it| optimizer.can_follow(&it))
        );
        Some(Advice { why, optimizer: instead })
    }
}

/// Whether entries may stay behind for many steps, whatever their size. Codecs of low rank send something of every entry, and
/// `significance` judges an entry by its parameter: both were seen to do no worse with momentum.
fn is_late(codec: &Codec, registry: &Registry) -> bool {
    codec.keeps_residual()
        && codec.bound(limits::BLOCK_ELEMENTS).of_norm >= LATE
        && !codec.needs_parameters()
        && !has_low_rank(codec, registry)
}

fn has_low_rank(codec: &Codec, registry: &Registry) -> bool {
    let text = codec.to_string();
    let stages = split_outside_parentheses(&text, '+').unwrap_or_default();
    let is_low_rank = |stage: &str| {
        let built = Spec::parse(stage).and_then(|spec| registry.codec.build(&spec));
        built.is_ok_and(|stage| stage.kind() == Kind::LowRank)
    };
    stages.into_iter().any(is_low_rank)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Axis;

    fn advice(codec: &str, optimizer: &str) -> Option<String> {
        let policy = Policy::default().with(Axis::Codec, codec).with(Axis::Optimizer, optimizer);
        Advice::on(&policy, &Registry::builtin()).map(|advice| advice.optimizer)
    }

    #[test]
    fn momentum_is_advised_against_where_most_of_a_gradient_comes_late() {
        for codec in [
            "topk:0.01",
            "topk:0.01+f16",
            "warmup:100+topk:0.01",
            "dgc:0.001",
            "onebit",
            "randk:0.1,residual=true",
        ] {
            for (optimizer, instead) in [
                ("adam:lr=0.001", "adam:lr=0.001,beta1=0"),
                ("adamw", "adamw:lr=0.001,beta1=0"),
                ("adam:beta1=0.8,lr=0.01,beta2=0.99", "adam:lr=0.01,beta1=0,beta2=0.99"),
                ("momentum:lr=0.03", "momentum:lr=0.3,beta=0"),
                ("nesterov:lr=0.1,beta=0.5,warmup=10", "nesterov:lr=0.2,warmup=10,beta=0"),
                ("lars:lr=1,trust=0.01", "lars:lr=10,trust=0.01,beta=0"),
            ] {
                assert_eq!(advice(codec, optimizer).as_deref(), Some(instead), "{codec}, {optimizer}");
                assert_eq!(advice(codec, instead), None, "{codec}: the remedy needs none");
            }
        }
    }

    #[test]
    fn an_outer_optimizer_without_momentum_goes_to_the_mean_of_the_workers() {
        let outer = crate::local::OUTER;
        let policy = Policy::default().with(Axis::Codec, "topk:0.01").with(Axis::Optimizer, outer);
        let policy = policy.with(Axis::Local, "steps:h=50");
        let advice = Advice::on(&policy, &Registry::builtin()).unwrap();
        assert_eq!(advice.optimizer, "nesterov:lr=1,beta=0");
    }

    #[test]
    fn other_codecs_and_optimizers_go_well_with_each_other() {
        for codec in [
            "none",
            "f16",
            "ef+int8",
            "qsgd:levels=4",
            "dvf:delta=1e-3",
            "significance:0.01",
            "powersgd:rank=2",
        ] {
            assert_eq!(advice(codec, "adam:lr=0.001"), None, "{codec}");
        }
        for optimizer in ["sgd:lr=0.1", "adagrad:lr=0.1", "rmsprop:lr=0.001", "momentum:lr=0.1,beta=0"] {
            assert_eq!(advice("topk:0.01", optimizer), None, "{optimizer}");
        }
        assert_eq!(advice("topk:0.01", "adam:lr=0"), None, "what cannot be read has an error of its own");
    }
}
