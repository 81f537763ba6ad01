//! Whether a policy can be changed while a job runs.

use super::config::{self, JobConfig};
use super::declarations::fits_a_message;
use super::workers::Workers;
use crate::consistency::SyncPolicy;
use crate::limits;
use crate::optimizer::OptimizerPolicy;
use crate::registry::Registry;
use crate::table::{PolicyOverride, glob_matches};
use crate::types::{ServerId, TableId};
use crate::wire::{Change, Plan};

/// What a change of policies is checked against.
pub(super) struct Switching<'a> {
    pub(super) config: &'a JobConfig,
    pub(super) registry: &'a Registry,
    pub(super) plan: &'a Plan,
    pub(super) workers: &'a Workers,
}

impl Switching<'_> {
    /// Whether these policies can hold from now on; the sentence that says what was changed.
    pub(super) fn check(&self, rule: &PolicyOverride) -> Result<String, String> {
        let (matched, place) = self.check_tables(rule)?;
        let mut changed = Vec::new();
        if let Some(sync) = &rule.sync {
            let policy = self.check_sync(rule, sync)?;
            changed.push(format!("use {policy}"));
        }
        if let Some(optimizer) = &rule.optimizer {
            let policy = self.check_optimizer(rule, optimizer)?;
            changed.push(format!("step with {policy}"));
        }
        let fixed = [
            ("reduce", rule.reduce.is_some()),
            ("order", rule.order.is_some()),
            ("nonfinite", rule.nonfinite.is_some()),
            ("codec", rule.codec.is_some()),
            ("answer_codec", rule.answer_codec.is_some()),
        ];
        if let Some((axis, _)) = fixed.into_iter().find(|(_, is_named)| *is_named) {
            return Err(format!("`{axis}` is fixed when the job starts"));
        }
        if changed.is_empty() {
            return Err("nothing to change: name a policy".into());
        }
        let mut next = self.plan.clone();
        next.apply(self.plan.epoch + 1, &Change::Policy(rule.clone()));
        if !fits_a_message(&next) {
            return Err("the plan would be longer than a message may be".into());
        }
        Ok(format!("{matched} tables now {} on {place}", changed.join(" and ")))
    }

    /// Whether there is something to change: how many tables, and where, in words.
    fn check_tables(&self, rule: &PolicyOverride) -> Result<(usize, String), String> {
        let plan = self.plan;
        rule.check()?;
        let exceptions = plan.overrides.len() + plan.switches.len();
        if exceptions >= limits::MAX_OVERRIDES {
            return Err(format!("there are {exceptions} exceptions already; repeat one of them"));
        }
        let matched = plan.tables.iter().filter(|table| glob_matches(&rule.table, &table.name)).count();
        if matched == 0 {
            return Err(format!(
                "no table matches `{}`; the job has {}",
                rule.table,
                config::names(&plan.tables)
            ));
        }
        if let Some(server) = rule.server.filter(|server| server.0 >= self.config.servers) {
            return Err(format!(
                "there is no {server}; the job has servers 0 to {}",
                self.config.servers - 1
            ));
        }
        Ok((matched, rule.server.map_or("all servers".into(), |server| server.to_string())))
    }

    fn check_sync(&self, rule: &PolicyOverride, sync: &str) -> Result<SyncPolicy, String> {
        let parse = |text: &str| {
            SyncPolicy::parse(&self.registry.consistency, text).map_err(|error| error.to_string())
        };
        let policy = parse(sync)?;
        let first = self.plan.policy_of(TableId(0), ServerId(0)).sync;
        if policy.overlap != parse(&first)?.overlap {
            return Err("`overlap` is fixed when the job starts".into());
        }
        let switches = self.plan.switches.iter().map(|switch| &switch.rule);
        let rules: Vec<PolicyOverride> =
            self.plan.overrides.iter().chain(switches).chain([rule]).cloned().collect();
        for (number, table) in (0..).zip(&self.plan.tables) {
            if !glob_matches(&rule.table, &table.name) {
                continue;
            }
            if policy.partial_pull().is_some()
                && let Some(worker) = self.workers.lender_of(TableId(number))
            {
                return Err(format!(
                    "table `{}` is exchanged as a slab by {worker}, and such exchanges wait for all blocks: `{policy}` needs \
                     `push_pull`; switch to psp without b and tau2",
                    table.name
                ));
            }
            config::check_table(
                self.registry,
                (&self.plan.tables, table),
                self.config.servers,
                &self.plan.policy,
                &rules,
            )
            .map_err(|error| error.to_string())?;
        }
        Ok(policy)
    }

    fn check_optimizer(&self, rule: &PolicyOverride, optimizer: &str) -> Result<OptimizerPolicy, String> {
        let parse = |text: &str| {
            OptimizerPolicy::parse(&self.registry.optimizer, text).map_err(|error| error.to_string())
        };
        let new = parse(optimizer)?;
        for (number, spec) in (0..).zip(&self.plan.tables) {
            if !glob_matches(&rule.table, &spec.name) {
                continue;
            }
            let old = self.plan.policy_of(TableId(number), rule.server.unwrap_or(ServerId(0))).optimizer;
            if !new.can_follow(&parse(&old)?) {
                return Err(format!(
                    "table `{}` is stepped by {old}: its parameters can be changed while it runs, but not the rule, \
                     nor whether gradients are clipped",
                    spec.name
                ));
            }
        }
        Ok(new)
    }
}
