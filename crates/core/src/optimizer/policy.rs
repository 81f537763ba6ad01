//! A rule together with what all rules share: learning rate, schedule, weight decay, clipping.

use super::{Gradient, Inertia, Optimizer, Schedule, Step, require_positive};
use crate::registry::{Axis, Entry, Param};
use crate::spec::{Spec, SpecError};
use std::fmt;

const LR: &str = "Learning rate, above 0.";
const WEIGHT_DECAY: &str = "Pulls parameters towards 0; adamw decouples it.";

pub(super) const COMMON: &[Param] = &[
    Param { name: "lr", default: None, about: LR },
    Param { name: "weight_decay", default: Some("0"), about: WEIGHT_DECAY },
    Param {
        name: "clip",
        default: Some("off"),
        about: "Largest L2 norm of a layer's gradient; a longer one is scaled down to it.",
    },
    Param {
        name: "schedule",
        default: Some("constant"),
        about: "How the learning rate falls: constant, step(every=30,factor=0.1), cosine(total=1000,floor=0), \
                invsqrt.",
    },
    Param {
        name: "warmup",
        default: Some("0"),
        about: "Versions over which the learning rate first rises in a line to lr; the schedule starts after them.",
    },
];

/// The learning rate of a rule that PyTorch has too, with the default that it has there.
pub(super) const fn lr(default: &'static str) -> Param {
    Param { name: "lr", default: Some(default), about: LR }
}

/// The same for the weight decay.
pub(super) const fn weight_decay(default: &'static str) -> Param {
    Param { name: "weight_decay", default: Some(default), about: WEIGHT_DECAY }
}

/// An update rule and the parameters common to all rules, as one text form says: `adam:lr=1e-3,clip=1,warmup=100`.
///
/// `Display` gives the text form back: the common parameters in a fixed order without those that have their
/// default (`lr` is always there), then the rule's own as they were written.
#[derive(Debug)]
pub struct OptimizerPolicy {
    rule: Box<dyn Optimizer>,
    /// The rule's name and its own parameters.
    spec: Spec,
    /// All parameters that the rule takes, with their defaults.
    declared: Vec<Param>,
    lr: f32,
    weight_decay: f32,
    clip: Option<f32>,
    schedule: Schedule,
    warmup: u64,
}

/// One step of a layer on one shard.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepInput {
    /// The table's version before the step; the schedule follows it.
    pub version: u64,
    /// Number of this step on these parameters, from 1.
    pub t: u64,
    /// Factor of the accumulated gradient: 1/workers for a mean, 1 for a sum.
    pub scale: f32,
    /// Multiplies the scheduled learning rate, as the linear scaling rule of PSP-SGD asks; otherwise 1.
    pub lr_factor: f32,
    /// L2 norm of the layer's parameters; read only when [`OptimizerPolicy::needs_norms`].
    pub parameter_norm: f64,
    /// L2 norm of the layer's accumulated gradient, before `scale`; read only when
    /// [`OptimizerPolicy::needs_norms`].
    pub gradient_norm: f64,
}

impl OptimizerPolicy {
    /// Reads the text form: the common parameters here, the rest by the rule it names.
    pub fn parse(axis: &Axis<dyn Optimizer>, text: &str) -> Result<OptimizerPolicy, SpecError> {
        let mut spec = Spec::parse(text)?;
        let entry = axis.entry(&spec.name)?;
        let declared = axis.params(entry);
        let lr = spec.take_parsed("lr", "a number above 0")?.or(default_of(&declared, "lr"));
        let lr =
            lr.ok_or_else(|| spec.parameter_error(format!("`lr` must be given, as in `{}`", entry.example)))?;
        require_positive(&spec, "lr", lr)?;
        let weight_decay = spec.take_parsed("weight_decay", "a number of at least 0")?;
        let weight_decay: f32 = weight_decay.or(default_of(&declared, "weight_decay")).unwrap_or(0.0);
        spec.require(weight_decay >= 0.0 && weight_decay.is_finite(), || {
            format!("weight_decay = {weight_decay}: expected weight_decay >= 0")
        })?;
        let clip = take_clip(&mut spec)?;
        let schedule = match spec.take("schedule") {
            Some(text) => Schedule::parse(&text)?,
            None => Schedule::Constant,
        };
        let warmup = spec.take_parsed("warmup", "a whole number of versions")?.unwrap_or(0);
        let rule = build_rule(entry, &spec, &declared)?;
        Ok(OptimizerPolicy { rule, spec, declared, lr, weight_decay, clip, schedule, warmup })
    }

    /// The rule's name.
    pub fn rule_name(&self) -> &str {
        &self.spec.name
    }

    /// Every parameter that the rule takes with the value that it has, also those that the text leaves out. The common
    /// ones come first.
    pub fn parameters(&self) -> Vec<(&'static str, String)> {
        let value = |param: &Param| match param.name {
            "lr" => self.lr.to_string(),
            "weight_decay" => self.weight_decay.to_string(),
            "clip" => self.clip.map_or("off".to_owned(), |clip| clip.to_string()),
            "schedule" => self.schedule.to_string(),
            "warmup" => self.warmup.to_string(),
            own => {
                let given =
                    self.spec.params.iter().find(|(key, _)| key == own).map(|(_, value)| value.as_str());
                given.or(param.default).expect("a parameter without a default was given").to_owned()
            }
        };
        self.declared.iter().map(|param| (param.name, value(param))).collect()
    }

    /// How many state arrays the rule keeps beside the parameters, zero at first.
    pub fn slots(&self) -> usize {
        self.rule.slots()
    }

    /// Whether it can take over from `other` between two steps: the same rule, whose state means the same, and which
    /// needs the same of a gradient.
    pub fn can_follow(&self, other: &OptimizerPolicy) -> bool {
        self.spec.name == other.spec.name
            && self.slots() == other.slots()
            && self.needs_norms() == other.needs_norms()
    }

    /// Whether [`StepInput`]'s norms must be filled: the rule needs them, or gradients are clipped.
    pub fn needs_norms(&self) -> bool {
        self.clip.is_some() || self.rule.needs_norms()
    }

    /// Whether elements that no gradient of a step has are stepped with zeros, instead of being left out.
    pub fn steps_absent(&self) -> bool {
        self.rule.steps_absent()
    }

    /// Whether what is pushed are values that parameters become.
    pub fn assigns(&self) -> bool {
        self.rule.assigns()
    }

    /// The same rule without momentum, in text form, with this learning rate, or one that takes parameters as far. `None` where
    /// it has no momentum.
    pub fn without_inertia(&self, lr: Option<f64>) -> Option<String> {
        let Inertia { parameter, gain } = self.rule.inertia()?;
        let mut spec = Spec::parse(&self.to_string()).expect("a policy is shown as it is written");
        // Five digits, so that 0.03 times 10 is shown as 0.3.
        let as_far = format!("{:.4e}", f64::from(self.lr) * gain).parse().expect("a number that was printed");
        let lr = lr.unwrap_or(as_far);
        for (key, value) in [("lr", lr.to_string()), (parameter, "0".to_owned())] {
            match spec.params.iter_mut().find(|(known, _)| known == key) {
                Some((_, old)) => *old = value,
                None => spec.params.push((key.to_owned(), value)),
            }
        }
        Some(spec.to_string())
    }

    /// The learning rate of the step that ends `version`.
    pub fn lr_at(&self, version: u64) -> f32 {
        let factor = if version < self.warmup {
            (version + 1) as f64 / self.warmup as f64
        } else {
            self.schedule.factor(version - self.warmup)
        };
        (f64::from(self.lr) * factor) as f32
    }

    /// Changes `parameters` by the accumulated gradient. A table may be stepped in pieces, each with the same
    /// `input`: the result is bit-identical. All slices have one length; `slots` are [`OptimizerPolicy::slots`].
    pub fn step(&self, input: StepInput, parameters: &mut [f32], gradient: &[f32], slots: &mut [&mut [f32]]) {
        self.step_with(input, parameters, gradient.into(), slots);
    }

    /// The same with a gradient that is of another type, or not added up yet.
    pub fn step_with(
        &self,
        input: StepInput,
        parameters: &mut [f32],
        gradient: Gradient<'_>,
        slots: &mut [&mut [f32]],
    ) {
        let len = parameters.len();
        assert_eq!(gradient.last.len(), len, "a gradient has its parameters' length");
        assert!(gradient.before.is_none_or(|sum| sum.len() == len), "a sum has its parameters' length");
        assert!(slots.iter().all(|slot| slot.len() == len), "a slot has its parameters' length");
        let norm = f64::from(input.scale) * input.gradient_norm;
        // A gradient of norm 0 gives an infinite quotient, which the minimum turns into 1.
        let clip = self.clip.map_or(1.0, |clip| (f64::from(clip) / norm).min(1.0));
        let step = Step {
            lr: self.lr_at(input.version) * input.lr_factor,
            t: input.t,
            gradient_scale: (f64::from(input.scale) * clip) as f32,
            weight_decay: self.weight_decay,
            parameter_norm: input.parameter_norm as f32,
            gradient_norm: (norm * clip) as f32,
        };
        self.rule.step_with(&step, parameters, gradient, slots);
    }
}

impl fmt::Display for OptimizerPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:lr={}", self.spec.name, self.lr)?;
        if Some(self.weight_decay) != default_of(&self.declared, "weight_decay") {
            write!(f, ",weight_decay={}", self.weight_decay)?;
        }
        if let Some(clip) = self.clip {
            write!(f, ",clip={clip}")?;
        }
        if self.schedule != Schedule::Constant {
            write!(f, ",schedule={}", self.schedule)?;
        }
        if self.warmup != 0 {
            write!(f, ",warmup={}", self.warmup)?;
        }
        self.spec.params.iter().try_for_each(|(key, value)| write!(f, ",{key}={value}"))
    }
}

/// The declared default of a number.
fn default_of(declared: &[Param], name: &str) -> Option<f32> {
    let text = declared.iter().find(|param| param.name == name)?.default?;
    Some(text.parse().expect("a declared default is a number"))
}

fn take_clip(spec: &mut Spec) -> Result<Option<f32>, SpecError> {
    let Some(text) = spec.take("clip") else { return Ok(None) };
    if text == "off" {
        return Ok(None);
    }
    let clip: f32 = text
        .parse()
        .map_err(|_| spec.parameter_error(format!("`clip={text}`: expected a number above 0, or off")))?;
    require_positive(spec, "clip", clip)?;
    Ok(Some(clip))
}

/// Builds the rule, after a check that names the common parameters too: `lrate=0.1` is a slip of `lr`.
fn build_rule(
    entry: &Entry<dyn Optimizer>,
    spec: &Spec,
    declared: &[Param],
) -> Result<Box<dyn Optimizer>, SpecError> {
    let known = |key: &str| entry.params.iter().any(|param| param.name == key);
    if let Some((key, value)) = spec.params.iter().find(|(key, _)| !known(key)) {
        let given = if key.is_empty() { value } else { key };
        let names: Vec<&str> = declared.iter().map(|param| param.name).collect();
        return Err(spec.parameter_error(format!("unknown parameter `{given}`; known: {}", names.join(", "))));
    }
    (entry.build)(spec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::axis;

    fn parse(text: &str) -> Result<OptimizerPolicy, SpecError> {
        OptimizerPolicy::parse(&axis(), text)
    }

    fn input(scale: f32, gradient_norm: f64) -> StepInput {
        StepInput { version: 0, t: 1, scale, lr_factor: 1.0, parameter_norm: 0.0, gradient_norm }
    }

    #[test]
    fn display_is_canonical() {
        for (text, canonical) in [
            ("sgd", "sgd:lr=0.001"),
            ("sgd:lr=1e-3", "sgd:lr=0.001"),
            ("sgd:weight_decay=0,clip=off,schedule=constant,warmup=0", "sgd:lr=0.001"),
            ("adamw", "adamw:lr=0.001"),
            ("adamw:weight_decay=0.01", "adamw:lr=0.001"),
            ("adamw:weight_decay=0", "adamw:lr=0.001,weight_decay=0"),
            ("momentum:beta=0.8,lr=0.5", "momentum:lr=0.5,beta=0.8"),
            (
                "adam:warmup=10,clip=1,schedule=step(factor=0.5),weight_decay=1e-4,lr=0.01,beta1=0.8",
                "adam:lr=0.01,weight_decay=0.0001,clip=1,schedule=step(every=30,factor=0.5),warmup=10,beta1=0.8",
            ),
        ] {
            let shown = parse(text).unwrap().to_string();
            assert_eq!(shown, canonical);
            assert_eq!(parse(&shown).unwrap().to_string(), canonical);
        }
    }

    #[test]
    fn errors_say_what_was_expected() {
        for (text, expected) in [
            (
                "sdg",
                "unknown optimizer `sdg`; known: sgd, momentum, nesterov, adagrad, rmsprop, adam, adamw, lars, assign",
            ),
            ("lars", "lars: `lr` must be given, as in `lars:lr=1,weight_decay=0.0001,beta=0.9,trust=0.001`"),
            ("sgd:lr=0", "sgd: lr = 0: expected lr > 0"),
            ("sgd:lr=inf", "sgd: lr = inf: expected lr > 0, and finite"),
            ("sgd:lr=nan", "sgd: lr = NaN: expected lr > 0"),
            ("sgd:lr=fast", "sgd: `lr=fast`: expected a number above 0"),
            ("sgd:weight_decay=-1", "sgd: weight_decay = -1: expected weight_decay >= 0"),
            ("sgd:clip=0", "sgd: clip = 0: expected clip > 0"),
            ("sgd:clip=no", "sgd: `clip=no`: expected a number above 0, or off"),
            ("sgd:warmup=-3", "sgd: `warmup=-3`: expected a whole number of versions"),
            (
                "sgd:lrate=1",
                "sgd: unknown parameter `lrate`; known: lr, weight_decay, clip, schedule, warmup, absent",
            ),
            (
                "sgd:0.1",
                "sgd: unknown parameter `0.1`; known: lr, weight_decay, clip, schedule, warmup, absent",
            ),
            ("momentum:beta=1.5", "momentum: beta = 1.5: expected 0 <= beta < 1"),
            ("adam:beta2=1", "adam: beta2 = 1: expected 0 <= beta2 < 1"),
            ("adagrad:epsilon=0", "adagrad: epsilon = 0: expected epsilon > 0"),
            ("rmsprop:decay=-0.1", "rmsprop: decay = -0.1: expected 0 <= decay < 1"),
            ("lars:lr=1,trust=inf", "lars: trust = inf: expected trust > 0, and finite"),
        ] {
            assert_eq!(parse(text).unwrap_err().to_string(), expected);
        }
    }

    /// The defaults of `torch.optim` (2.15), so that a text without a value means what a script in PyTorch means.
    #[test]
    fn defaults_are_those_of_pytorch() {
        let common = [("clip", "off"), ("schedule", "constant"), ("warmup", "0")];
        for (rule, lr, weight_decay, own) in [
            ("sgd", "0.001", "0", &[("absent", "skip")][..]),
            ("momentum", "0.001", "0", &[("beta", "0.9")]),
            ("nesterov", "0.001", "0", &[("beta", "0.9")]),
            ("adagrad", "0.01", "0", &[("epsilon", "1e-10")]),
            ("rmsprop", "0.01", "0", &[("decay", "0.99"), ("epsilon", "1e-8")]),
            ("adam", "0.001", "0", &[("beta1", "0.9"), ("beta2", "0.999"), ("epsilon", "1e-8")]),
            ("adamw", "0.001", "0.01", &[("beta1", "0.9"), ("beta2", "0.999"), ("epsilon", "1e-8")]),
        ] {
            let mut expected = vec![("lr", lr), ("weight_decay", weight_decay)];
            expected.extend(common.iter().chain(own));
            let parameters = parse(rule).unwrap().parameters();
            let found: Vec<(&str, &str)> =
                parameters.iter().map(|(key, value)| (*key, value.as_str())).collect();
            assert_eq!(found, expected, "{rule}");
        }
    }

    #[test]
    fn parameters_have_the_values_of_the_text() {
        let policy =
            parse("momentum:lr=1e-2,weight_decay=0.5,clip=2,warmup=3,beta=0.80,schedule=invsqrt").unwrap();
        let expected = [("lr", "0.01"), ("weight_decay", "0.5"), ("clip", "2"), ("schedule", "invsqrt")];
        let expected = expected.into_iter().chain([("warmup", "3"), ("beta", "0.80")]);
        assert!(policy.parameters().iter().map(|(key, value)| (*key, value.as_str())).eq(expected));
    }

    #[test]
    fn warm_up_rises_in_a_line_and_the_schedule_starts_after_it() {
        let policy = parse("sgd:lr=0.8,warmup=4,schedule=step(every=2,factor=0.5)").unwrap();
        let rates: Vec<f32> = (0..9).map(|version| policy.lr_at(version)).collect();
        assert_eq!(rates, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.4, 0.4, 0.2]);
    }

    #[test]
    fn clipping_looks_at_the_scaled_norm() {
        let policy = parse("sgd:lr=1,clip=5").unwrap();
        assert!(policy.needs_norms());
        // Two workers' gradients add up to norm 20; their mean has norm 10 and is halved.
        let mut parameters = [0.0, 0.0];
        policy.step(input(0.5, 20.0), &mut parameters, &[12.0, 16.0], &mut []);
        assert_eq!(parameters, [-3.0, -4.0]);
        // A short gradient stays as it is, and so does none.
        let mut parameters = [0.0, 0.0];
        policy.step(input(0.5, 5.0), &mut parameters, &[3.0, 4.0], &mut []);
        assert_eq!(parameters, [-1.5, -2.0]);
        policy.step(input(0.5, 0.0), &mut parameters, &[0.0, 0.0], &mut []);
        assert_eq!(parameters, [-1.5, -2.0]);
    }

    #[test]
    fn the_learning_rate_factor_multiplies_the_schedule() {
        let policy = parse("sgd:lr=1,schedule=invsqrt").unwrap();
        let mut parameters = [0.0];
        let input = StepInput { version: 3, lr_factor: 4.0, ..input(1.0, 0.0) };
        policy.step(input, &mut parameters, &[1.0], &mut []);
        assert_eq!(parameters, [-2.0]);
    }
}
