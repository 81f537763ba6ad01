//! Which consistency model holds where: what the job began with, and every switch that a shard has made.

use crate::actor::Actor;
use crate::scenario::{Scenario, ScenarioError};
use paramill_core::hold::Hold;
use paramill_core::policy::{Axis, PolicyOverride};
use paramill_core::registry::Registry;
use paramill_core::server::Shard;
use paramill_core::spec::Spec;
use paramill_core::types::{NodeId, ShardId, TableId};
use paramill_core::wire::Plan;
use std::collections::BTreeMap;

#[derive(Debug)]
pub(super) struct Policies {
    /// The epoch that each shard has entered.
    epochs: BTreeMap<ShardId, u32>,
    /// Every model that held for a table on a shard, the one in force last.
    models: BTreeMap<(ShardId, TableId), Vec<Model>>,
}

/// The most pushes from which updates may be held back in a job, under its own policy, an exception or a switch; `None` where none
/// are.
pub(super) fn held_at_most(scenario: &Scenario) -> Result<Option<u64>, ScenarioError> {
    let changes = scenario.switches.iter().map(|switch| &switch.change).chain(&scenario.overrides);
    let texts = changes.filter_map(|change| change.policies.get(Axis::Hold));
    let registry = Registry::builtin();
    let mut most = None;
    for text in texts.chain([scenario.policy.get(Axis::Hold)]) {
        let hold = Hold::parse(&registry.hold, text);
        let hold = hold.map_err(|error| ScenarioError::Value(error.to_string()))?;
        most = most.max(hold.map(|hold| hold.most()));
    }
    Ok(most)
}

/// What a checker has to know of a model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Model {
    /// Its text form.
    pub(super) sync: String,
    /// The most rounds that an answer may lack, if that is bounded.
    pub(super) bound: Option<u64>,
    /// The most rounds that a worker's copy may lack where it is a cache.
    pub(super) cache_bound: Option<u64>,
    /// Whether a round's gradients become one step, so that a version means the same bits to everybody.
    pub(super) on_round: bool,
    /// Whether a gradient may be left out for coming late.
    pub(super) drops: bool,
    /// Whether a round may close without all gradients, though they are applied later.
    pub(super) closes_early: bool,
}

impl Policies {
    pub(super) fn new(
        scenario: &Scenario,
        shards: impl Iterator<Item = ShardId>,
    ) -> Result<Policies, ScenarioError> {
        let tables: Vec<String> = scenario.tables.iter().map(|table| table.name.clone()).collect();
        let mut models = BTreeMap::new();
        for shard in shards {
            for (number, name) in (0..).zip(&tables) {
                let job = scenario.policy.clone();
                let policy = PolicyOverride::resolve(job, &scenario.overrides, name, shard.server);
                models.insert((shard, TableId(number)), vec![Model::of(policy.get(Axis::Sync))?]);
            }
        }
        Ok(Policies { epochs: BTreeMap::new(), models })
    }

    /// The model of a table on a shard.
    pub(super) fn model(&self, shard: ShardId, table: TableId) -> Option<&Model> {
        self.models.get(&(shard, table))?.last()
    }

    /// How often the model of a table was switched on a shard.
    pub(super) fn switches(&self, shard: ShardId, table: TableId) -> usize {
        self.models.get(&(shard, table)).map_or(0, |models| models.len() - 1)
    }

    /// The most rounds that an answer may lack whose request came after so many switches; it may have been released
    /// under any model since.
    pub(super) fn bound_since(&self, shard: ShardId, table: TableId, switches: usize) -> Option<u64> {
        let models = self.models.get(&(shard, table))?.iter().skip(switches);
        models.map(|model| model.bound).try_fold(0, |most, bound| Some(bound?.max(most)))
    }

    /// Follows the plan that a shard has entered, which may be later than the coordinator's message came: a copy may have to have that
    /// first. Says which tables changed there.
    pub(super) fn follow(&mut self, node: NodeId, actor: &Actor) -> Result<Vec<(ShardId, TableId)>, String> {
        let (NodeId::Shard(shard), Some(plan)) = (node, actor.as_shard().and_then(Shard::plan)) else {
            return Ok(Vec::new());
        };
        // A process that the shard was taken from may not have heard of it.
        if self.epochs.get(&shard).is_some_and(|known| *known >= plan.epoch) {
            return Ok(Vec::new());
        }
        self.epochs.insert(shard, plan.epoch);
        self.compare(shard, plan)
    }

    /// Which tables have another model on a shard by this plan.
    fn compare(&mut self, shard: ShardId, plan: &Plan) -> Result<Vec<(ShardId, TableId)>, String> {
        let mut changed = Vec::new();
        for number in (0..plan.tables.len() as u32).map(TableId) {
            let policy = plan.policy_of(number, shard.server);
            let models = self.models.entry((shard, number)).or_default();
            let sync = policy.get(Axis::Sync);
            if models.last().is_none_or(|known| known.sync != sync) {
                models.push(Model::of(sync).map_err(|error| error.to_string())?);
                changed.push((shard, number));
            }
        }
        Ok(changed)
    }
}

impl Model {
    /// What is known of a model by its text form. One that is registered and not known here is an error: what it promises
    /// would not be checked.
    pub(super) fn of(sync: &str) -> Result<Model, ScenarioError> {
        let spec = Spec::parse(sync).ok();
        let number = |key: &str| {
            let value =
                |spec: &Spec| spec.params.iter().find(|(known, _)| known == key).map(|(_, v)| v.clone());
            spec.as_ref().and_then(value).and_then(|value| value.parse().ok())
        };
        let (bound, on_round, drops) = match spec.as_ref().map(|spec| spec.name.as_str()) {
            Some("bsp") => (Some(0), true, false),
            Some("drop" | "psp" | "quorum") => (Some(0), true, true),
            // Late gradients of rounds that a condition closed are dropped; those that are applied may come after the last round.
            Some("when") if sync.contains("step=round") => (None, true, sync.contains("push=")),
            Some("ssp") => (number("s"), false, false),
            Some("dsps") => (number("max"), false, false),
            Some("asp" | "pssp" | "when" | "remote") => (None, false, false),
            Some(name) if Registry::builtin().consistency.entry(name).is_ok() => {
                let why =
                    format!("the checkers know no consistency model `{name}`: say there what it promises");
                return Err(ScenarioError::Value(why));
            }
            // A bare condition.
            _ => (None, false, false),
        };
        let text = |key: &str| {
            let params = spec.as_ref().map_or(&[][..], |spec| &spec.params);
            params.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
        };
        let is_cached = text("cache") != Some("off") && text("overlap") != Some("false");
        let cache_bound = match spec.as_ref().map(|spec| spec.name.as_str()) {
            Some("ssp" | "pssp") => number("s"),
            Some("dsps") => Some(number("min").unwrap_or(1)),
            _ => None,
        };
        let cache_bound = cache_bound.filter(|_| is_cached);
        let has_condition = sync.starts_with("when:") || sync.starts_with("remote:");
        let closes_early = has_condition && sync.contains("push=");
        Ok(Model { sync: sync.to_owned(), bound, cache_bound, on_round, drops, closes_early })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_follow_the_text_form() {
        let bound = |sync: &str| Model::of(sync).unwrap().bound;
        assert_eq!(
            (bound("bsp"), bound("ssp:s=3,exec=soft"), bound("dsps:min=1,max=8")),
            (Some(0), Some(3), Some(8))
        );
        assert_eq!((bound("asp"), bound("pssp:s=3,c=0.5"), bound("psp:c=2")), (None, None, Some(0)));
        let cache_bound = |sync: &str| Model::of(sync).unwrap().cache_bound;
        assert_eq!(
            ["ssp:s=3", "ssp:s=3,cache=off", "ssp:s=3,overlap=false", "dsps", "pssp:s=2,c=1", "bsp"]
                .map(cache_bound),
            [Some(3), None, None, Some(1), Some(2), None]
        );
        for entry in Registry::builtin().consistency.entries() {
            assert!(Model::of(entry.example).is_ok(), "{}", entry.name);
        }
        let drops = |sync: &str| Model::of(sync).unwrap().drops;
        assert!(drops("drop:n=3") && drops("psp:c=2") && drops("quorum") && !drops("pssp:s=1,c=1"));
        assert!(drops("when:pull=true,push=true,step=round") && !drops("when:pull=true,push=true"));
    }
}
