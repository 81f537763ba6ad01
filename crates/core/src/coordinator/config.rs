//! A job as its owner describes it.

use crate::codec::Codec;
use crate::consistency::SyncPolicy;
use crate::limits;
use crate::optimizer::OptimizerPolicy;
use crate::policy::{Axis, Policy, PolicyOverride, Reduce};
use crate::registry::Registry;
use crate::spec::SpecError;
use crate::status::JobSize;
use crate::table::{TableSpec, glob_matches};
use crate::types::ServerId;
use std::collections::BTreeSet;
use std::time::Duration;

/// A job as its owner describes it.
#[derive(Debug, Clone)]
pub struct JobConfig {
    /// Its name, the last part of its URL.
    pub job: String,
    /// Workers to wait for.
    pub workers: u32,
    /// Servers to wait for.
    pub servers: u32,
    /// Policies of every table.
    pub policy: Policy,
    /// Exceptions from them.
    pub overrides: Vec<PolicyOverride>,
    /// Everything random follows from it.
    pub seed: u64,
    /// A worker that is silent for this long is declared dead.
    pub worker_timeout: Duration,
    /// A job that cannot go on without a worker that died waits for so long that it is started anew.
    pub restart_grace: Duration,
}

impl JobConfig {
    /// A job with the defaults of everything but its size.
    pub fn new(job: impl Into<String>, workers: u32, servers: u32) -> JobConfig {
        JobConfig {
            job: job.into(),
            workers,
            servers,
            policy: Policy::default(),
            overrides: Vec::new(),
            seed: 0,
            worker_timeout: limits::WORKER_TIMEOUT,
            restart_grace: Duration::ZERO,
        }
    }

    /// The configuration that servers need before they start their data cores. Policies of tables are not known yet.
    pub fn size(&self, registry: &Registry) -> JobSize {
        let needs_norms = |text: &&str| {
            OptimizerPolicy::parse(&registry.optimizer, text).is_ok_and(|policy| policy.needs_norms())
        };
        let exceptions = self.overrides.iter().filter_map(|rule| rule.policies.get(Axis::Optimizer));
        let texts = std::iter::once(self.policy.get(Axis::Optimizer)).chain(exceptions);
        let norms = texts.into_iter().find(needs_norms).map(str::to_owned);
        JobSize { workers: self.workers, servers: self.servers, norms }
    }

    /// Whether every text form can be built and every number is in range. Called before a job starts.
    pub fn check(&self, registry: &Registry) -> Result<(), SpecError> {
        let range = |what: &str, value: u64, max: u64| {
            let why = format!("{what} = {value}: expected 1 to {max}");
            if (1..=max).contains(&value) {
                Ok(())
            } else {
                Err(SpecError::Parameter { component: "job".into(), why })
            }
        };
        range("workers", self.workers.into(), limits::MAX_WORKERS.into())?;
        range("servers", self.servers.into(), limits::MAX_SERVERS.into())?;
        let fault = |why: String| Err(SpecError::Parameter { component: "job".into(), why });
        if self.job.is_empty() || self.job.len() > limits::MAX_NAME_BYTES {
            return fault(format!(
                "a name of {} bytes: expected 1 to {}",
                self.job.len(),
                limits::MAX_NAME_BYTES
            ));
        }
        if self.overrides.len() > limits::MAX_OVERRIDES {
            let (count, most) = (self.overrides.len(), limits::MAX_OVERRIDES);
            return fault(format!("{count} exceptions from its policies: expected at most {most}"));
        }
        self.policy.check(registry)?;
        check_answers(&self.policy.codecs(registry)?.answer, &self.policy.sync(registry)?)?;
        self.overrides.iter().try_for_each(|rule| self.check_rule(registry, rule))
    }

    /// Whether an exception from the job's policies can be made. The job's own policies must be valid.
    pub(super) fn check_rule(&self, registry: &Registry, rule: &PolicyOverride) -> Result<(), SpecError> {
        let fault = |why: String| Err(SpecError::Parameter { component: "job".into(), why });
        rule.check()?;
        rule.policies.check(registry)?;
        if let Some(server) = rule.server.filter(|server| server.0 >= self.servers) {
            let last = self.servers - 1;
            return fault(format!("an exception for {server}: the job has servers 0 to {last}"));
        }
        let overlap = self.policy.sync(registry)?.overlap;
        match rule.policies.get(Axis::Sync) {
            // The scheduler between push and pull is the whole job's.
            Some(sync) if SyncPolicy::parse(&registry.consistency, sync)?.overlap != overlap => {
                fault(format!("`{sync}`: `overlap` is the same for all tables of a job"))
            }
            _ => Ok(()),
        }
    }

    /// Whether the job's policies fit the tables that its workers declare: every exception is from some table's
    /// policies, and what holds for a table in the end can work. The job must have passed [`JobConfig::check`].
    pub fn check_tables(&self, registry: &Registry, tables: &[TableSpec]) -> Result<(), SpecError> {
        let is_unused =
            |rule: &&PolicyOverride| !tables.iter().any(|table| glob_matches(&rule.table, &table.name));
        if let Some(rule) = self.overrides.iter().find(is_unused) {
            return Err(SpecError::Parameter {
                component: format!("an exception for table `{}`", rule.table),
                why: format!("no table matches; the job has {}", names(tables)),
            });
        }
        let check =
            |table| check_table(registry, (tables, table), self.servers, &self.policy, &self.overrides);
        tables.iter().try_for_each(check)
    }
}

/// The tables' names, for a sentence.
pub(super) fn names(tables: &[TableSpec]) -> String {
    const SHOWN: usize = 20;
    let shown: Vec<&str> = tables.iter().map(|table| table.name.as_str()).take(SHOWN).collect();
    let more =
        if tables.len() > SHOWN { format!(" and {} more", tables.len() - SHOWN) } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

/// Answers that are differences build on each other: none may be left out.
fn check_answers(answers: &Codec, sync: &SyncPolicy) -> Result<(), SpecError> {
    match answers.is_for_differences() && sync.partial_pull().is_some() {
        true => Err(SpecError::Parameter {
            component: answers.to_string(),
            why: format!("`{sync}` drops late answers, and these are differences, each of which counts"),
        }),
        false => Ok(()),
    }
}

/// Whether the policies that hold for one of the job's tables in the end, on each of its servers, fit each other and the
/// table. Each of them was checked by itself.
pub(super) fn check_table(
    registry: &Registry,
    (tables, table): (&[TableSpec], &TableSpec),
    servers: u32,
    job: &Policy,
    overrides: &[PolicyOverride],
) -> Result<(), SpecError> {
    let fault = |why: String| SpecError::Parameter { component: format!("table `{}`", table.name), why };
    let mut before: Option<(ServerId, SyncPolicy)> = None;
    for server in servers_apart(servers, overrides) {
        let policy = table.policy_on(server, job, overrides);
        let (sync, codecs) = (policy.sync(registry)?, policy.codecs(registry)?);
        let (pushes, answers) = (codecs.push, codecs.answer);
        check_answers(&answers, &sync).map_err(|error| fault(error.to_string()))?;
        if table.rows && answers.is_for_differences() {
            return Err(fault(format!(
                "answers by `{answers}` are differences to what a worker holds, and workers hold nothing of a table of \
                 rows; give it {}=none, or a quantiser such as f16",
                Axis::AnswerCodec
            )));
        }
        if table.rows && pushes.needs_parameters() {
            return Err(fault(format!(
                "`{pushes}` compares a gradient with the parameters that a worker holds, and workers hold nothing of a \
                 table of rows; give it codec=none, or another codec"
            )));
        }
        if sync.partial_pull().is_some() && tables.iter().all(|table| table.rows) {
            return Err(fault(format!(
                "b and tau2 of `{sync}` are about the blocks of dense tables, and this job has none: pulls of rows wait for \
                 everything; leave b and tau2 out"
            )));
        }
        if policy.reduce() == Reduce::Sum && sync.model.lr_factor(1, 2) != 1.0 {
            return Err(fault(format!(
                "under `{sync}` the learning rate grows with the gradients in a round, and with reduce=sum the gradient \
                 would grow with them too; use reduce=mean"
            )));
        }
        if let Some((other, known)) = &before
            && known.partial_pull() != sync.partial_pull()
        {
            return Err(fault(format!(
                "`{known}` on {other}, `{sync}` on {server}: a worker waits for the blocks of all servers together, so \
                 that b and tau2 are the same on all servers; leave out `server`, or b and tau2"
            )));
        }
        before = before.or(Some((server, sync)));
    }
    Ok(())
}

/// Servers on which a table's policies may differ: those that an exception names, and one of the others.
fn servers_apart(servers: u32, overrides: &[PolicyOverride]) -> BTreeSet<ServerId> {
    let mut apart: BTreeSet<ServerId> = overrides.iter().filter_map(|rule| rule.server).collect();
    let other = (0..servers).map(ServerId).find(|server| !apart.contains(server));
    apart.extend(other);
    apart
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policies;

    fn job() -> JobConfig {
        JobConfig::new("job", 2, 2)
    }

    fn with(axis: Axis, text: &str) -> JobConfig {
        JobConfig { policy: Policy::default().with(axis, text), ..job() }
    }

    fn rule(axis: Axis, text: &str) -> PolicyOverride {
        PolicyOverride::new("*", Policies::of([(axis, text)]))
    }

    #[test]
    fn a_job_has_as_many_of_everything_as_there_may_be_and_no_more() {
        let registry = Registry::builtin();
        let (workers, servers) = (limits::MAX_WORKERS, limits::MAX_SERVERS);
        let name = "n".repeat(limits::MAX_NAME_BYTES);
        let overrides = |count| vec![rule(Axis::Sync, "asp"); count];
        let most = limits::MAX_OVERRIDES;
        for fine in [
            JobConfig { workers, servers, ..job() },
            JobConfig { job: name.clone(), ..job() },
            JobConfig { overrides: overrides(most), ..job() },
        ] {
            assert_eq!(fine.check(&registry), Ok(()));
        }
        for (wrong, words) in [
            (JobConfig { workers: 0, ..job() }, "workers = 0: expected 1 to 16384"),
            (JobConfig { workers: workers + 1, ..job() }, "workers = 16385"),
            (JobConfig { servers: servers + 1, ..job() }, "servers = 1025: expected 1 to 1024"),
            (JobConfig { job: String::new(), ..job() }, "a name of 0 bytes"),
            (JobConfig { job: name + "n", ..job() }, "a name of 257 bytes"),
            (JobConfig { overrides: overrides(most + 1), ..job() }, "4097 exceptions"),
            (with(Axis::Sync, "spsp"), "spsp"),
            (JobConfig { overrides: vec![rule(Axis::Codec, "f17")], ..job() }, "f17"),
        ] {
            let error = wrong.check(&registry).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn an_exception_is_for_a_server_of_the_job_and_leaves_overlap_alone() {
        let registry = Registry::builtin();
        let on = |server| PolicyOverride { server: Some(ServerId(server)), ..rule(Axis::Sync, "asp") };
        assert_eq!(job().check_rule(&registry, &on(1)), Ok(()));
        let error = job().check_rule(&registry, &on(2)).unwrap_err().to_string();
        assert!(error.contains("server 2: the job has servers 0 to 1"), "{error}");
        let apart = rule(Axis::Sync, "bsp:overlap=false");
        let error = job().check_rule(&registry, &apart).unwrap_err().to_string();
        assert!(error.contains("`overlap` is the same for all tables"), "{error}");
        assert_eq!(with(Axis::Sync, "asp:overlap=false").check_rule(&registry, &apart), Ok(()));
    }

    #[test]
    fn policies_that_do_not_fit_a_table_or_each_other_are_refused() {
        let registry = Registry::builtin();
        let (dense, sparse) = (TableSpec::dense("w", [8]), TableSpec::sparse("rows", 8, 2));
        let differences = "topk:0.1";
        let partial = "psp:c=1,b=0.5";
        let all: &[TableSpec] = &[dense.clone(), sparse.clone()];
        for (what, job, tables, words) in [
            ("fits", job(), all, None),
            ("differences", with(Axis::AnswerCodec, differences), &all[..1], None),
            (
                "differences of rows",
                with(Axis::AnswerCodec, differences),
                all,
                Some("workers hold nothing of a table of rows"),
            ),
            (
                "parameters of rows",
                with(Axis::Codec, "significance:0.1"),
                all,
                Some("compares a gradient with the parameters"),
            ),
            ("blocks", with(Axis::Sync, partial), all, None),
            ("blocks of rows", with(Axis::Sync, partial), &all[1..], Some("this job has none")),
        ] {
            let found = job.check_tables(&registry, tables).err().map(|error| error.to_string());
            assert_eq!(found.is_some(), words.is_some(), "{what}: {found:?}");
            assert!(found.unwrap_or_default().contains(words.unwrap_or_default()), "{what}");
        }
        let late = JobConfig {
            policy: with(Axis::Sync, partial).policy.with(Axis::AnswerCodec, differences),
            ..job()
        };
        let error = late.check(&registry).unwrap_err().to_string();
        assert!(error.contains("drops late answers"), "{error}");
        let one_server = PolicyOverride { server: Some(ServerId(1)), ..rule(Axis::Sync, partial) };
        let apart = JobConfig { overrides: vec![one_server], ..job() };
        let error = apart.check_tables(&registry, &all[..1]).unwrap_err().to_string();
        assert!(error.contains("b and tau2 are the same on all servers"), "{error}");
        let unused = PolicyOverride::new("q*", Policies::of([(Axis::Sync, "asp")]));
        let unused = JobConfig { overrides: vec![unused], ..job() };
        let error = unused.check_tables(&registry, all).unwrap_err().to_string();
        assert!(error.contains("no table matches; the job has w, rows"), "{error}");
    }

    #[test]
    fn a_long_list_of_tables_is_cut_in_a_sentence() {
        let tables = |count: usize| vec![TableSpec::dense("w", [1]); count];
        assert_eq!((names(&tables(2)), names(&tables(20)).matches('w').count()), ("w, w".into(), 20));
        assert!(names(&tables(23)).ends_with("w, w and 3 more"), "{}", names(&tables(23)));
    }

    #[test]
    fn servers_hear_of_optimizers_whose_steps_depend_on_norms() {
        let registry = Registry::builtin();
        let size = |job: JobConfig| job.size(&registry).norms;
        assert_eq!(size(job()), None);
        assert_eq!(size(with(Axis::Optimizer, "lars:lr=0.1")).as_deref(), Some("lars:lr=0.1"));
        let exception = JobConfig { overrides: vec![rule(Axis::Optimizer, "lars:lr=0.1")], ..job() };
        assert_eq!(size(exception).as_deref(), Some("lars:lr=0.1"));
        let JobSize { workers, servers, .. } = JobConfig::new("job", 3, 2).size(&registry);
        assert_eq!((workers, servers), (3, 2));
    }
}
