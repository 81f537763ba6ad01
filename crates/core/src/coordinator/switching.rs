//! Whether a policy can be changed while a job runs.

use super::config::{self, JobConfig};
use super::declarations::fits_a_message;
use super::workers::Workers;
use crate::limits;
use crate::policy::{Axis, Policy, PolicyOverride};
use crate::registry::Registry;
use crate::spec::SpecError;
use crate::table::TableSpec;
use crate::types::{ServerId, TableId};
use crate::wire::{Change, Plan};

/// A check of policy changes, with the state that it needs.
pub(super) struct Switching<'a> {
    pub(super) config: &'a JobConfig,
    pub(super) registry: &'a Registry,
    pub(super) plan: &'a Plan,
    pub(super) workers: &'a Workers,
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
        let is_meant = |(_, table): &(TableId, &TableSpec)| rule.is_for(&table.name, server);
        let meant: Vec<_> = (0..).map(TableId).zip(&plan.tables).filter(is_meant).collect();
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
            self.check_sync(number, table, &old, &new)?;
            let optimizer = new.optimizer(registry).map_err(text)?;
            if !optimizer.can_follow(&old.optimizer(registry).map_err(text)?) {
                return Err(format!(
                    "table `{}` is stepped by {}: its parameters can be changed while it runs, but not the rule, nor whether \
                     gradients are clipped",
                    table.name,
                    old.get(Axis::Optimizer)
                ));
            }
            let (tables, servers) = ((plan.tables.as_slice(), table), self.config.servers);
            config::check_table(registry, tables, servers, &plan.policy, &overrides).map_err(text)?;
        }
        Ok(meant.len())
    }

    /// Whether a table can go over to a consistency model.
    fn check_sync(
        &self,
        number: TableId,
        table: &TableSpec,
        old: &Policy,
        new: &Policy,
    ) -> Result<(), String> {
        let parse = |policy: &Policy| policy.sync(self.registry).map_err(|error| error.to_string());
        let sync = parse(new)?;
        if sync.overlap != parse(old)?.overlap {
            return Err("`overlap` is fixed when the job starts".into());
        }
        match self.workers.lender_of(number) {
            Some(worker) if sync.partial_pull().is_some() => Err(format!(
                "table `{}` is exchanged as a slab by {worker}, and such exchanges wait for all blocks: `{sync}` needs \
                 `push_pull`; switch to psp without b and tau2",
                table.name
            )),
            _ => Ok(()),
        }
    }
}
