//! Declarations of tables by workers, and the first plan that is made from them.

use super::config::JobConfig;
use crate::limits;
use crate::policy::{Axis, PolicyOverride};
use crate::registry::Registry;
use crate::spec::Spec;
use crate::table::TableSpec;
use crate::types::WorkerId;
use crate::wire::control::{self, frame};
use crate::wire::{Control, Kind, Member, Plan, ServedShard};
use std::collections::BTreeSet;

/// The job's tables, as far as they are declared.
#[derive(Debug, Default)]
pub(super) struct Declarations {
    tables: Vec<TableSpec>,
}

impl Declarations {
    /// Takes a worker's tables. Those of the first one to declare some are checked, and what those of all others are compared with:
    /// `other` is one of these.
    pub(super) fn take(
        &mut self,
        worker: WorkerId,
        tables: Vec<TableSpec>,
        other: Option<WorkerId>,
        config: &JobConfig,
        registry: &Registry,
    ) -> Result<(), String> {
        if tables.is_empty() || tables.len() > limits::MAX_TABLES {
            return Err(format!(
                "{worker} declared {} tables; expected 1 to {}",
                tables.len(),
                limits::MAX_TABLES
            ));
        }
        if let Some(other) = other {
            return self.compare(worker, &tables, &other.to_string());
        }
        let mut names = BTreeSet::new();
        for table in &tables {
            table.check()?;
            if !names.insert(&table.name) {
                return Err(format!("{worker} declared table `{}` twice", table.name));
            }
            let own = PolicyOverride::new("*", table.policy.clone());
            let fits = config.check_rule(registry, &own);
            fits.map_err(|error| format!("table `{}`: {error}", table.name))?;
        }
        config.check_tables(registry, &tables).map_err(|error| error.to_string())?;
        self.tables = tables;
        Ok(())
    }

    /// Whether a worker's tables are those that the job has.
    pub(super) fn compare(&self, worker: WorkerId, tables: &[TableSpec], other: &str) -> Result<(), String> {
        let theirs = &self.tables;
        if theirs.len() != tables.len() {
            return Err(format!("{worker} declared {} tables, {other} {}", tables.len(), theirs.len()));
        }
        match tables.iter().zip(theirs).find(|(mine, theirs)| mine != theirs) {
            Some((mine, theirs)) => {
                mine.check()?;
                Err(format!(
                    "{worker} declared table `{}` of shape {:?}, {other} declared `{}` of shape {:?} in its place; \
                     all workers must declare the same tables in the same order",
                    mine.name, mine.shape, theirs.name, theirs.shape
                ))
            }
            None => Ok(()),
        }
    }

    /// The plan that a job begins with. The error says why it cannot be planned.
    pub(super) fn plan(
        &self,
        config: &JobConfig,
        registry: &Registry,
        shards: Vec<ServedShard>,
        members: Vec<Member>,
    ) -> Result<Plan, String> {
        let placement = Spec::parse(config.policy.get(Axis::Placement))
            .and_then(|spec| registry.placement.build(&spec))
            .expect("checked before the job started");
        let sizes: Vec<_> = self.tables.iter().map(TableSpec::size).collect();
        let plan = Plan {
            epoch: Plan::FIRST_EPOCH,
            parts: placement.place(&sizes, config.servers),
            tables: self.tables.clone(),
            shards,
            workers: config.workers,
            members,
            policy: config.policy.clone(),
            overrides: config.overrides.clone(),
            switches: Vec::new(),
            seed: config.seed,
        };
        if !fits_a_message(&plan) {
            return Err(format!(
                "{} tables on {} servers make more than a message of {} bytes can say: use fewer tables, or a \
                 placement that keeps them whole",
                plan.tables.len(),
                config.servers,
                limits::MAX_CONTROL_BYTES
            ));
        }
        plan.check()?;
        Ok(plan)
    }
}

/// Whether a plan can be sent.
pub(super) fn fits_a_message(plan: &Plan) -> bool {
    control::fits(&frame(Kind::Control, &Control::Plan(Box::new(plan.clone()))))
}
