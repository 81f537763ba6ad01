//! Whether a policy can be changed while a job runs.

use super::config::{self, JobConfig};
use super::declarations::fits_a_message;
use crate::bandwidth;
use crate::limits;
use crate::policy::{Axis, Policy, PolicyOverride};
use crate::registry::Registry;
use crate::spec::SpecError;
use crate::table::{TableSpec, glob_matches};
use crate::types::{ServerId, ShardId, TableId};
use crate::wire::{Change, Plan};
use std::collections::BTreeSet;

/// A check of policy changes, with the state that it needs.
pub(super) struct Switching<'a> {
    pub(super) config: &'a JobConfig,
    pub(super) registry: &'a Registry,
    pub(super) plan: &'a Plan,
    pub(super) has_aggregators: bool,
}

impl Switching<'_> {
    /// Whether these policies can hold from now on; the sentence that says what was changed.
    pub(super) fn check(&self, rule: &PolicyOverride) -> Result<String, String> {
        let (plan, text) = (self.plan, |error: SpecError| error.to_string());
        let fixed = |(axis, _): (Axis, &str)| Some((axis, axis.info().fixed?));
        if let Some((axis, why)) = rule.policies.iter().find_map(fixed) {
            return Err(format!("`{axis}` cannot be changed while a job runs: {why}"));
        }
        if rule.policies.is_empty() {
            return Err("no policy is named".into());
        }
        let mut next = plan.clone();
        next.apply(plan.epoch + 1, &Change::Policy(rule.clone()));
        if next.overrides.len() + next.switches.len() > limits::MAX_OVERRIDES {
            let exceptions = plan.overrides.len() + plan.switches.len();
            return Err(format!("there are {exceptions} exceptions already; repeat one of them"));
        }
        if let Some(server) = rule.server.filter(|server| server.0 >= self.config.servers) {
            let last = self.config.servers - 1;
            return Err(format!("there is no {server}; the job has servers 0 to {last}"));
        }
        rule.check().map_err(text)?;
        rule.policies.check(self.registry).map_err(text)?;
        if !fits_a_message(&next) {
            return Err("the plan would be longer than a message may be".into());
        }
        let matched = self.check_tables(rule, &next)?;
        let place = rule.server.map_or("all servers".into(), |server| server.to_string());
        let tables = if matched == 1 { "table now has" } else { "tables now have" };
        Ok(format!("{matched} {tables} {} on {place}", rule.policies))
    }

    /// Whether every table that is meant can go over to the next plan's policies. Says how many there are.
    fn check_tables(&self, rule: &PolicyOverride, next: &Plan) -> Result<usize, String> {
        let (plan, registry, text) = (self.plan, self.registry, |error: SpecError| error.to_string());
        let server = rule.server.unwrap_or(ServerId(0));
        let (mut meant, mut layers) = (Vec::new(), 0);
        for (number, table) in (0..).map(TableId).zip(&plan.tables) {
            let count = layers_meant(rule, table)?;
            if count > 0 {
                meant.push((number, table));
                layers += count;
            }
        }
        if meant.is_empty() {
            return Err(format!(
                "no table matches `{}`; the job has {}",
                rule.table,
                config::names(&plan.tables)
            ));
        }
        let switches = next.switches.iter().map(|switch| &switch.rule);
        let overrides: Vec<PolicyOverride> = next.overrides.iter().chain(switches).cloned().collect();
        for &(number, table) in &meant {
            let (old, new) = (plan.policy_of(number, server), next.policy_of(number, server));
            self.check_sync(&old, &new)?;
            let optimizer = new.optimizer(registry).map_err(text)?;
            if !optimizer.can_follow(&old.optimizer(registry).map_err(text)?) {
                return Err(format!(
                    "table `{}` is stepped by {}: its parameters can be changed while it runs, but not the rule, nor whether \
                     gradients are clipped",
                    table.name,
                    old.get(Axis::Optimizer)
                ));
            }
            self.check_whole(number, table, &new)?;
            let codecs = new.codecs(registry).map_err(text)?;
            let mut both = [codecs.push, codecs.answer].into_iter().filter(|_| self.has_aggregators);
            if let Some(codec) = both.find(|codec| codec.needs_bandwidth().is_some()) {
                let why = bandwidth::not_behind_aggregators(&codec);
                return Err(format!("table `{}`: {why}", table.name));
            }
            let (tables, servers) = ((plan.tables.as_slice(), table), self.config.servers);
            config::check_table(registry, tables, servers, &plan.policy, &overrides).map_err(text)?;
        }
        Ok(layers)
    }

    /// Whether a table that is cut goes on with policies that need its layers whole.
    fn check_whole(&self, number: TableId, table: &TableSpec, new: &Policy) -> Result<(), String> {
        let needs_whole = new.needs_whole_layers(self.registry).map_err(|error| error.to_string())?;
        if !needs_whole || self.plan.whole.binary_search(&number).is_ok() {
            return Ok(());
        }
        let chunks = &self.plan.chunks()[number.0 as usize];
        let shards: BTreeSet<ShardId> = chunks.iter().map(|chunk| chunk.shard).collect();
        match shards.len() {
            1 => Ok(()),
            count => Err(format!(
                "table `{}` is cut over {count} data cores, and {} needs its layers whole: start the job with it, for all tables \
                 or for this one, and the table is kept whole",
                table.name,
                new.get(Axis::Codec)
            )),
        }
    }

    /// Whether a table can go over to a consistency model.
    fn check_sync(&self, old: &Policy, new: &Policy) -> Result<(), String> {
        let parse = |policy: &Policy| policy.sync(self.registry).map_err(|error| error.to_string());
        if parse(new)?.overlap != parse(old)?.overlap {
            return Err("`overlap` is fixed when the job starts".into());
        }
        Ok(())
    }
}

/// How many layers of a table a rule names: all, or none.
fn layers_meant(rule: &PolicyOverride, table: &TableSpec) -> Result<usize, String> {
    let is_named = |name: &&str| glob_matches(&rule.table, name);
    let names = || table.layers().map(|layer| layer.name);
    let count = names().filter(is_named).count();
    let mut others = names().filter(|name| !is_named(name));
    let (Some(other), Some(named)) = (others.next(), names().find(is_named)) else { return Ok(count) };
    let more = others.count();
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    Err(format!(
        "`{}` names `{named}`, but not `{other}`{more}, and these travel in one table, `{}`: name all of them, or give the \
         policy when the job starts, so that they are packed apart",
        rule.table, table.name
    ))
}
