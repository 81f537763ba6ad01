//! Declarations of tables by workers, and the first plan that is made from them.

use super::config::JobConfig;
use crate::checkpoint::Manifest;
use crate::limits;
use crate::placement::place_tables;
use crate::policy::{Axis, PolicyOverride};
use crate::registry::Registry;
use crate::spec::Spec;
use crate::table::{TableSpec, repeated_name};
use crate::types::WorkerId;
use crate::wire::control::{self, frame};
use crate::wire::{Control, Kind, Member, Plan, ServedShard};

/// The job's tables, as far as they are declared.
#[derive(Debug, Default)]
pub(super) struct Declarations {
    tables: Vec<TableSpec>,
}

impl Declarations {
    pub(super) fn tables(&self) -> &[TableSpec] {
        &self.tables
    }

    pub(super) fn restore(tables: Vec<TableSpec>) -> Declarations {
        Declarations { tables }
    }

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
        if let Some(name) = repeated_name(&tables) {
            return Err(format!("{worker} declared table `{name}` twice"));
        }
        for table in &tables {
            table.check()?;
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
                if (&mine.name, &mine.shape) == (&theirs.name, &theirs.shape) {
                    return Err(format!(
                        "{worker} declared table `{}` with other layers or policies than {other}; all workers must declare \
                         the same tables",
                        mine.name
                    ));
                }
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
        let whole = config.whole_tables(registry, &self.tables);
        config.check_resume(registry, &self.tables)?;
        let resumed = config.resume().map(Manifest::resumed);
        let first = resumed.as_ref().map_or(0, |resumed| resumed.clock);
        let plan = Plan {
            epoch: Plan::FIRST_EPOCH,
            parts: place_tables(&*placement, &self.tables, &whole, config.servers),
            tables: self.tables.clone(),
            whole,
            shards,
            workers: config.workers,
            members: members.into_iter().map(|member| member.from_clock(first)).collect(),
            policy: config.policy.clone(),
            overrides: config.overrides.clone(),
            switches: Vec::new(),
            seed: config.seed,
            resumed,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policies;
    use crate::types::{ProcessId, ServerId, ShardId};

    fn take(
        declarations: &mut Declarations,
        tables: &[TableSpec],
        other: Option<WorkerId>,
    ) -> Result<(), String> {
        let (config, registry) = (JobConfig::new("job", 2, 1), Registry::builtin());
        declarations.take(WorkerId(1), tables.to_vec(), other, &config, &registry)
    }

    #[test]
    fn the_first_tables_are_checked_and_the_others_compared_with_them() {
        let mut declarations = Declarations::default();
        let tables = ["a", "b"].map(|name| TableSpec::dense(name, [4]));
        assert_eq!(take(&mut declarations, &tables, None), Ok(()));
        let first = Some(WorkerId(0));
        assert_eq!(take(&mut declarations, &tables, first), Ok(()));
        let why = take(&mut declarations, &tables[..1], first).unwrap_err();
        assert!(why.contains("worker 1 declared 1 tables, worker 0 2"), "{why}");
        let turned: Vec<TableSpec> = tables.iter().rev().cloned().collect();
        let why = take(&mut declarations, &turned, first).unwrap_err();
        assert!(
            why.contains("worker 1 declared table `b`") && why.contains("worker 0 declared `a`"),
            "{why}"
        );
    }

    #[test]
    fn tables_that_cannot_be_are_refused() {
        let table = |name: &str| TableSpec::dense(name, [4]);
        let many: Vec<TableSpec> =
            (0..=limits::MAX_TABLES).map(|number| table(&number.to_string())).collect();
        let own = TableSpec { policy: Policies::of([(Axis::Codec, "f17")]), ..table("own") };
        for (tables, words) in [
            (&[][..], "declared 0 tables; expected 1 to 65536"),
            (&many[..], "declared 65537 tables"),
            (&[table("a"), table("a")], "worker 1 declared table `a` twice"),
            (&[TableSpec::dense("a", [0])], "expected 1 to"),
            (&[own], "table `own`"),
        ] {
            let why = take(&mut Declarations::default(), tables, None).expect_err(words);
            assert!(why.contains(words), "{why}");
        }
        assert_eq!(take(&mut Declarations::default(), &many[1..], None), Ok(()));
    }

    #[test]
    fn a_plan_that_is_longer_than_a_message_is_refused() {
        let mut declarations = Declarations::default();
        let shard = |server| {
            ServedShard::original(
                ShardId { server: ServerId(server), core: 0 },
                ProcessId(1),
                "host:1".into(),
            )
        };
        let members = || vec![Member::original(WorkerId(0), 1)];
        let registry = Registry::builtin();
        take(&mut declarations, &[TableSpec::dense("w", [1 << 20])], None).unwrap();
        let config = JobConfig::new("job", 1, 2);
        let plan = declarations.plan(&config, &registry, vec![shard(0), shard(1)], members()).unwrap();
        assert_eq!((plan.epoch, plan.parts.len(), plan.workers), (Plan::FIRST_EPOCH, 1, 1));
        // Every name is as long as may be.
        let name = |number: usize| format!("{number:0>256}");
        let tables: Vec<TableSpec> =
            (0..limits::MAX_TABLES).map(|at| TableSpec::dense(name(at), [1])).collect();
        take(&mut declarations, &tables, None).unwrap();
        let why = declarations.plan(&config, &registry, vec![shard(0), shard(1)], members()).unwrap_err();
        assert!(
            why.contains("65536 tables on 2 servers make more than a message of 16777216 bytes"),
            "{why}"
        );
    }
}
