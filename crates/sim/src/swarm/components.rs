//! Components of a world, drawn from the registry: whatever is registered is drawn sooner or later. One that no arguments
//! are known for makes the draw fail, so that a new component is not left out unnoticed.

use super::dice::Dice;
use crate::judge::CONDITION;
use crate::scenario::Scenario;
use paramill_core::codec::{Codec, Kind, Stage};
use paramill_core::optimizer::OptimizerPolicy;
use paramill_core::policy::Axis;
use paramill_core::registry::{self, Entry, Registry};
use paramill_core::spec::Spec;

/// Conditions of a user's own.
const PULL_CONDITIONS: [&str; 3] =
    ["progress < v_train + 2 || rand() > 0.5", "progress < v_train + 3", "progress - slowest < 2"];
const PUSH_CONDITIONS: [&str; 2] = ["count >= n", "count >= n - 1"];
/// Models that decide where worker 0 does not.
const FALLBACKS: [&str; 4] = ["asp", "ssp:s=1", "(pssp:s=2,c=0.5)", "when:pull=progress - slowest < 2"];
/// Conditions under which updates are held back.
const HOLD_CONDITIONS: [&str; 3] = ["true", "held < 2", "significance < 0.5 / sqrt(clock + 1)"];
/// Attempts at a chain of stages before the one from the registry is taken as it is.
const ATTEMPTS: usize = 8;

/// What a world asks of its components.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    /// Pushes are counted: nothing may be scaled, lost or rounded.
    pub(super) exact: bool,
    pub(super) workers: u32,
    /// There is a dense table, which can be pulled partially.
    pub(super) has_dense: bool,
}

/// Draws components.
#[derive(Debug)]
pub(super) struct Components<'a> {
    registry: &'a Registry,
}

impl<'a> Components<'a> {
    pub(super) fn of(registry: &'a Registry) -> Components<'a> {
        Components { registry }
    }

    pub(super) fn registry(&self) -> &'a Registry {
        self.registry
    }

    /// A text for an axis of policies whose texts are components.
    pub(super) fn text(&self, dice: &mut Dice, axis: Axis, wanted: Wanted) -> Result<String, String> {
        match axis {
            Axis::Sync => self.consistency(dice, wanted),
            Axis::Placement => self.placement(dice),
            Axis::Optimizer => self.optimizer(dice, wanted),
            Axis::Codec => self.codec(dice, wanted, false),
            Axis::AnswerCodec => self.codec(dice, wanted, true),
            Axis::Broadcast => self.broadcast(dice),
            Axis::Local => Ok(local(dice)),
            Axis::Hold => self.hold(dice),
            other => Err(format!("the swarm does not know how to draw `{other}`")),
        }
    }

    fn consistency(&self, dice: &mut Dice, wanted: Wanted) -> Result<String, String> {
        // Partial synchrony scales gradients.
        let entries = self.registry.consistency.entries().iter();
        let entries: Vec<_> = entries.filter(|entry| !wanted.exact || entry.name != "psp").collect();
        let entry = entries[dice.below(entries.len())];
        let workers = u64::from(wanted.workers);
        let cached = |dice: &mut Dice, params: String| match dice.whole(0, 4) {
            0 => format!("{params},cache=on"),
            1 => format!("{params},cache=off"),
            _ => params,
        };
        let params = match entry.name {
            "bsp" | "asp" => String::new(),
            "ssp" => {
                let params = format!("s={}", dice.whole(1, 3));
                cached(dice, params)
            }
            "dsps" => {
                let params = format!("min={},max={}", dice.whole(1, 2), dice.whole(2, 5));
                cached(dice, params)
            }
            "drop" => {
                let late = if dice.chance(0.3) { ",late=apply" } else { "" };
                format!("n={}{late}", dice.whole(1, workers))
            }
            "pssp" => {
                let s = dice.whole(1, 3);
                let params = match dice.whole(0, 2) {
                    0 => format!("s={s},c={:.2}", dice.between(0.1, 1.0)),
                    1 if !wanted.exact => format!("s={s},alpha=significance"),
                    _ => format!("s={s},alpha={:.2}", dice.between(0.2, 1.5)),
                };
                cached(dice, params)
            }
            "psp" => {
                let c = format!("c={}", dice.whole(1, workers));
                let b = format!(",b={:.2}", dice.between(0.3, 1.0));
                let tau1 = format!(",tau1={}ms", dice.whole(1, 9));
                let tau2 = format!(",tau2={}ms", dice.whole(1, 9));
                let mut some = |text: String, p: f64| if dice.chance(p) { text } else { String::new() };
                let tau1 = some(tau1, 0.5);
                let (b, tau2) = match wanted.has_dense {
                    true => (some(b, 0.7), some(tau2, 0.5)),
                    false => Default::default(),
                };
                format!("{c}{b}{tau1}{tau2}")
            }
            "quorum" => {
                let grace = match dice.whole(0, 2) {
                    0 => format!(",grace={}ms", dice.whole(0, 9)),
                    _ => String::new(),
                };
                // What is weighed is no whole number of pushes any more.
                let late = match dice.whole(0, 3) {
                    0 => ",late=carry",
                    1 if !wanted.exact => ",late=weigh",
                    _ => "",
                };
                format!("q={:.2}{grace}{late}", dice.between(0.3, 1.0))
            }
            "when" => {
                let pull = dice.pick(&PULL_CONDITIONS);
                match dice.whole(0, 3) {
                    // Rounds that make one step are kept for few iterations ahead.
                    3 => {
                        let late = if dice.chance(0.3) { ",late=apply" } else { "" };
                        format!("pull=gap < 1,push={},step=round{late}", dice.pick(&PUSH_CONDITIONS))
                    }
                    // A bare condition takes no parameters.
                    0 => return Ok(pull.to_owned()),
                    1 => format!("pull={pull}"),
                    _ => format!("pull={pull},push={}", dice.pick(&PUSH_CONDITIONS)),
                }
            }
            "remote" => {
                let fallback = dice.pick(&FALLBACKS);
                format!("{CONDITION},deadline={}ms,fallback={fallback}", dice.whole(1, 100))
            }
            _ => by_default(&self.registry.consistency, entry)?,
        };
        let exec = if dice.chance(0.3) { "exec=soft" } else { "" };
        let params: Vec<&str> = [params.as_str(), exec].into_iter().filter(|text| !text.is_empty()).collect();
        Ok(with_params(entry.name, &params.join(",")))
    }

    fn broadcast(&self, dice: &mut Dice) -> Result<String, String> {
        let entries = self.registry.broadcast.entries();
        let entry = &entries[dice.below(entries.len())];
        Ok(with_params(entry.name, &by_default(&self.registry.broadcast, entry)?))
    }

    fn hold(&self, dice: &mut Dice) -> Result<String, String> {
        let entries = self.registry.hold.entries();
        let entry = &entries[dice.below(entries.len())];
        let params = match entry.name {
            "none" => return Ok(entry.name.to_owned()),
            "significance" => format!("{:.3}", dice.magnitude(0.01, 3.0)),
            "variance" => format!("{:.2}", dice.between(1.1, 4.0)),
            "when" => dice.pick(&HOLD_CONDITIONS).to_owned(),
            _ => by_default(&self.registry.hold, entry)?,
        };
        let pulls = if dice.chance(0.2) { ",pulls=off" } else { "" };
        Ok(with_params(entry.name, &format!("{params},most={}{pulls}", dice.whole(1, 6))))
    }

    fn placement(&self, dice: &mut Dice) -> Result<String, String> {
        let entries = self.registry.placement.entries();
        let entry = &entries[dice.below(entries.len())];
        Ok(with_params(entry.name, &by_default(&self.registry.placement, entry)?))
    }

    fn optimizer(&self, dice: &mut Dice, wanted: Wanted) -> Result<String, String> {
        let axis = &self.registry.optimizer;
        if wanted.exact {
            return Ok("sgd:lr=1".into());
        }
        let entry = &axis.entries()[dice.below(axis.entries().len())];
        let mut params = format!("lr={:.4}", dice.magnitude(0.002, 0.1));
        for (extra, p) in [("clip=1", 0.2), ("weight_decay=0.001", 0.2), ("warmup=5", 0.2)] {
            if dice.chance(p) {
                params = format!("{params},{extra}");
            }
        }
        let text = with_params(entry.name, &params);
        if OptimizerPolicy::parse(axis, &text).is_ok() {
            return Ok(text);
        }
        let known = OptimizerPolicy::parse(axis, entry.example).map(|_| entry.example.to_owned());
        known.map_err(|error| {
            format!("the swarm has no arguments for the optimizer `{}`: {error}", entry.name)
        })
    }

    /// A chain of stages. Each stage is drawn with its example, and often with others around it.
    fn codec(&self, dice: &mut Dice, wanted: Wanted, for_answers: bool) -> Result<String, String> {
        let axis = &self.registry.codec;
        let parse = |text: &str| {
            if for_answers { Codec::for_answers(axis, text) } else { Codec::for_pushes(axis, text) }
        };
        let fits = |text: &str| parse(text).is_ok_and(|codec| !wanted.exact || codec.is_lossless());
        for _ in 0..ATTEMPTS {
            let entry = &axis.entries()[dice.below(axis.entries().len())];
            let text = self.chain(dice, entry)?;
            if fits(&text) {
                return Ok(text);
            }
            if fits(entry.example) {
                return Ok(entry.example.to_owned());
            }
        }
        Ok("none".into())
    }

    /// A chain around an entry that may or may not make sense.
    fn chain(&self, dice: &mut Dice, entry: &Entry<Stage>) -> Result<String, String> {
        Codec::parse(&self.registry.codec, entry.example)
            .map_err(|error| format!("the example of the codec `{}` does not build: {error}", entry.name))?;
        let mut stages = vec![entry.example];
        for kind in [Kind::Quantiser, Kind::Container, Kind::Bytes] {
            let others = self.examples_of(kind);
            if dice.chance(0.3) && !others.is_empty() {
                stages.push(others[dice.below(others.len())]);
            }
        }
        if dice.chance(0.2) {
            stages.insert(0, "ef");
        }
        Ok(stages.join("+"))
    }

    /// The examples of single stages of a kind.
    fn examples_of(&self, kind: Kind) -> Vec<&'static str> {
        let axis = &self.registry.codec;
        let is_of_kind = |example: &&str| {
            let spec = Spec::parse(example).ok().filter(|_| !example.contains('+'));
            spec.and_then(|spec| axis.build(&spec).ok()).is_some_and(|stage| stage.kind() == kind)
        };
        axis.entries().iter().map(|entry| entry.example).filter(is_of_kind).collect()
    }
}

/// Few steps, so that a world has many synchronisations.
fn local(dice: &mut Dice) -> String {
    let h = dice.whole(1, 4);
    format!("steps:h={h},fragments={},late={}", dice.whole(1, h), dice.whole(0, h - 1))
}

/// No parameters, if an entry needs none.
fn by_default<T: ?Sized>(axis: &registry::Axis<T>, entry: &Entry<T>) -> Result<String, String> {
    // Those that every component of the axis takes have defaults.
    match entry.params.iter().find(|param| param.default.is_none()) {
        None => Ok(String::new()),
        Some(param) => Err(format!(
            "the swarm has no arguments for the {} `{}`, which needs `{}`",
            axis.name.to_lowercase(),
            entry.name,
            param.name
        )),
    }
}

fn with_params(name: &str, params: &str) -> String {
    if params.is_empty() { name.to_owned() } else { format!("{name}:{params}") }
}

/// All registered components, as `axis/name`.
pub(super) fn registered(registry: &Registry) -> Vec<String> {
    let Registry { consistency, placement, optimizer, codec, broadcast, hold } = registry;
    let consistency = consistency.entries().iter().map(|entry| format!("consistency/{}", entry.name));
    let placement = placement.entries().iter().map(|entry| format!("placement/{}", entry.name));
    let optimizer = optimizer.entries().iter().map(|entry| format!("optimizer/{}", entry.name));
    let codec = codec.entries().iter().map(|entry| format!("codec/{}", entry.name));
    let broadcast = broadcast.entries().iter().map(|entry| format!("broadcast/{}", entry.name));
    let hold = hold.entries().iter().map(|entry| format!("hold/{}", entry.name));
    consistency.chain(placement).chain(optimizer).chain(codec).chain(broadcast).chain(hold).collect()
}

/// The components of a job, as `axis/name`.
pub(super) fn used(registry: &Registry, scenario: &Scenario) -> Vec<String> {
    let changes = scenario.switches.iter().map(|switch| &switch.change).chain(&scenario.overrides);
    let exceptions = changes.flat_map(|change| change.policies.iter());
    let job = paramill_core::policy::AXES.iter().map(|info| (info.axis, scenario.policy.get(info.axis)));
    let mut used = Vec::new();
    for (axis, text) in job.chain(exceptions) {
        let name = |text: &str| Spec::parse(text).map(|spec| spec.name).unwrap_or_default();
        match axis {
            // A bare condition has no name.
            Axis::Sync if registry.consistency.entry(&name(text)).is_err() => {
                used.push("consistency/when".into());
            }
            Axis::Sync => used.push(format!("consistency/{}", name(text))),
            Axis::Placement => used.push(format!("placement/{}", name(text))),
            Axis::Optimizer => used.push(format!("optimizer/{}", name(text))),
            Axis::Broadcast => used.push(format!("broadcast/{}", name(text))),
            Axis::Hold => used.push(format!("hold/{}", name(text))),
            Axis::Codec | Axis::AnswerCodec => {
                used.extend(text.split('+').map(|stage| format!("codec/{}", name(stage))));
            }
            _ => {}
        }
    }
    used.sort();
    used.dedup();
    used
}

#[cfg(test)]
mod tests {
    use super::*;
    use paramill_core::consistency::SyncPolicy;
    use paramill_core::policy::{AXES, Text};
    use paramill_core::prng::Prng;
    use std::collections::BTreeSet;

    #[test]
    fn everything_that_is_registered_is_drawn() {
        let registry = Registry::builtin();
        let components = Components::of(&registry);
        let mut seen = BTreeSet::new();
        for seed in 0..3000 {
            let mut dice = Dice::new(Prng::new(seed));
            let wanted = Wanted { exact: seed % 2 == 0, workers: 3, has_dense: true };
            let mut scenario = Scenario::new(3, 1, 10);
            let axes = AXES.iter().filter(|info| matches!(info.text, Text::Component(_)));
            for axis in axes.map(|info| info.axis) {
                let text = components.text(&mut dice, axis, wanted).unwrap();
                scenario = scenario.with(axis, text);
            }
            scenario.policy.check(&registry).unwrap();
            seen.extend(used(&registry, &scenario));
        }
        for name in registered(&registry) {
            assert!(seen.contains(&name), "{name} is never drawn");
        }
    }

    #[test]
    fn a_component_without_known_arguments_fails_the_draw() {
        let mut registry = Registry::builtin();
        let &Entry { about, params, example, build, .. } = registry.consistency.entry("ssp").unwrap();
        registry.consistency.register(Entry { name: "brand_new", about, params, example, build });
        let draw = |seed| {
            let wanted = Wanted { exact: true, workers: 3, has_dense: true };
            Components::of(&registry).text(&mut Dice::new(Prng::new(seed)), Axis::Sync, wanted)
        };
        let error = (0..200).find_map(|seed| draw(seed).err()).unwrap();
        assert!(
            error.contains("no arguments for the consistency model `brand_new`, which needs `s`"),
            "{error}"
        );
        assert!(SyncPolicy::parse(&registry.consistency, "bsp").is_ok());
    }
}
