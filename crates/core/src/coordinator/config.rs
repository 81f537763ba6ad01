//! A job as its owner describes it.

use crate::broadcast::Topology;
use crate::checkpoint::{CheckpointPolicy, Manifest};
use crate::codec::Codec;
use crate::consistency::SyncPolicy;
use crate::hold::Hold;
use crate::limits;
use crate::local;
use crate::policy::{Axis, JobPolicies, Policy, PolicyOverride, Reduce};
use crate::registry::Registry;
use crate::spec::SpecError;
use crate::status::JobSize;
use crate::table::{Layer, TableSpec, glob_matches};
use crate::types::{Clock, ProcessId, ServerId, TableId};
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
    /// The server in the coordinator's own process, if there is one. Servers without a number, which may come before it, take another.
    pub own_server: Option<ServerId>,
    /// The process of that server: its shards are gone when the coordinator is.
    pub own_process: Option<ProcessId>,
    /// Copies that are kept of every shard on other servers: none or one.
    pub replicas: u32,
    /// Policies of every table.
    pub policy: Policy,
    /// Exceptions from them.
    pub overrides: Vec<PolicyOverride>,
    /// The network between the hosts, as far as it is known: the trees of broadcasts follow from it.
    pub topology: Topology,
    /// Everything random follows from it.
    pub seed: u64,
    /// A worker that is silent for this long is declared dead.
    pub worker_timeout: Duration,
    /// A member that makes no progress for so long while others wait for it is left behind; none is without.
    pub progress_timeout: Option<Duration>,
    /// A job that cannot go on without a worker that died waits for so long that it is started anew.
    pub restart_grace: Duration,
    /// The checkpoints that it makes and goes on from.
    pub checkpoints: Option<Checkpointing>,
}

/// The checkpoints of a job.
#[derive(Debug, Clone)]
pub struct Checkpointing {
    /// When they are made, and how many stay; none are without an archive.
    pub policy: Option<CheckpointPolicy>,
    /// The one that the job goes on from.
    pub resume: Option<Manifest>,
    /// Complete ones that are in the archive, oldest first, by clock and folder.
    pub kept: Vec<(Clock, String)>,
}

impl JobConfig {
    /// A job with the defaults of everything but its size.
    pub fn new(job: impl Into<String>, workers: u32, servers: u32) -> JobConfig {
        JobConfig {
            job: job.into(),
            workers,
            servers,
            own_server: None,
            own_process: None,
            replicas: 0,
            policy: Policy::default(),
            overrides: Vec::new(),
            topology: Topology::default(),
            seed: 0,
            worker_timeout: limits::WORKER_TIMEOUT,
            progress_timeout: None,
            restart_grace: Duration::ZERO,
            checkpoints: None,
        }
    }

    /// The configuration that servers need before they start their data cores.
    pub fn size(&self) -> JobSize {
        JobSize { workers: self.workers, servers: self.servers }
    }

    /// Whether it makes checkpoints that are kept.
    pub(super) fn keeps_checkpoints(&self) -> bool {
        self.checkpoints.as_ref().is_some_and(|checkpoints| checkpoints.policy.is_some())
    }

    /// The checkpoint that the job goes on from.
    pub(super) fn resume(&self) -> Option<&Manifest> {
        self.checkpoints.as_ref()?.resume.as_ref()
    }

    /// Whether a job with these tables can go on from its checkpoint: it has the same tables, and optimizers that can take over. The
    /// job must have passed [`JobConfig::check_tables`].
    pub(super) fn check_resume(&self, registry: &Registry, tables: &[TableSpec]) -> Result<(), String> {
        let Some(manifest) = self.resume() else { return Ok(()) };
        manifest.check_tables(tables)?;
        for table in tables {
            let saved = manifest.table(&table.name).map(|saved| saved.optimizer.as_str()).unwrap_or_default();
            let before = Policy::default().with(Axis::Optimizer, saved).optimizer(registry);
            let now = table.policy_on(ServerId(0), &self.policy, &self.overrides).optimizer(registry);
            if let (Ok(before), Ok(now)) = (before, now)
                && !now.can_follow(&before)
            {
                return Err(format!(
                    "checkpoint {} has the state of `{before}` for table `{}`, and the job's optimizer is `{now}`, which cannot \
                     go on from it; use --optimizer {before}",
                    manifest.folder, table.name
                ));
            }
        }
        Ok(())
    }

    /// The policies that the job begins with.
    pub(super) fn policies(&self) -> JobPolicies {
        JobPolicies { policy: self.policy.clone(), overrides: self.overrides.clone() }
    }

    /// The tables that are not cut, ascending: on some server their policies need whole layers
    /// ([`Policy::needs_whole_layers`]). The tables must have passed [`JobConfig::check_tables`].
    pub fn whole_tables(&self, registry: &Registry, tables: &[TableSpec]) -> Vec<TableId> {
        let servers = servers_apart(self.servers, &self.overrides);
        let is_whole = |(_, table): &(TableId, &TableSpec)| {
            servers.iter().any(|server| {
                let policy = table.policy_on(*server, &self.policy, &self.overrides);
                policy.needs_whole_layers(registry).unwrap_or(false)
            })
        };
        (0..).map(TableId).zip(tables).filter(is_whole).map(|(number, _)| number).collect()
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
        if self.replicas > 1 || self.replicas >= self.servers {
            let Self { replicas, servers, .. } = self;
            return fault(format!(
                "replicas = {replicas}: expected 0, or 1 with at least two servers, since copies are kept on others, and servers = \
                 {servers}"
            ));
        }
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
        let is_about = |rule: &PolicyOverride, table: &TableSpec| {
            table.layers().any(|layer| glob_matches(&rule.table, layer.name))
        };
        let is_unused = |rule: &&PolicyOverride| !tables.iter().any(|table| is_about(rule, table));
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

/// The names of tables, and of the layers of packs, for a sentence.
pub(super) fn names(tables: &[TableSpec]) -> String {
    const SHOWN: usize = 20;
    let names = || tables.iter().flat_map(TableSpec::layers).map(|layer| layer.name);
    let (shown, count): (Vec<&str>, _) = (names().take(SHOWN).collect(), names().count());
    let more = if count > SHOWN { format!(" and {} more", count - SHOWN) } else { String::new() };
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
        check_pack(table, server, &policy, (job, overrides)).map_err(fault)?;
        let (sync, codecs) = (policy.sync(registry)?, policy.codecs(registry)?);
        let (pushes, answers) = (codecs.push, codecs.answer);
        check_answers(&answers, &sync).map_err(|error| fault(error.to_string()))?;
        if policy.is_broadcast() {
            check_broadcast(table, &policy, &sync).map_err(fault)?;
        } else if table.rows && answers.is_for_differences() {
            return Err(fault(format!(
                "answers by `{answers}` are differences to what a worker holds, and workers hold nothing of a table of \
                 rows; give it {}=none, or a quantiser such as f16",
                Axis::AnswerCodec
            )));
        }
        if policy.is_local() {
            check_local(table, &policy, &sync, registry).map_err(fault)?;
        }
        if let Some(hold) = policy.hold(registry)? {
            check_hold(&hold, &policy, registry).map_err(fault)?;
        }
        if answers.needs_bandwidth().is_some() && !policy.is_broadcast() {
            return Err(fault(format!(
                "`{answers}` follows the links on which versions are broadcast, and answers to pulls are none; give it \
                 `delta` in place of `low` and `up`, or choose {}=star or another tree",
                Axis::Broadcast
            )));
        }
        if policy.optimizer(registry)?.assigns() && pushes.is_for_differences() {
            return Err(fault(format!(
                "parameters become what is pushed, and `{pushes}` leaves out some of it; give the table codec=none, or a quantiser \
                 such as bf16"
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
            && policy.is_broadcast()
            && known.to_string() != sync.to_string()
        {
            return Err(fault(format!(
                "`{known}` on {other}, `{sync}` on {server}: where versions are broadcast a worker goes on by one model; leave out \
                 `server`"
            )));
        }
        before = before.or(Some((server, sync)));
    }
    Ok(())
}

/// Whether a table can be broadcast under a consistency model.
fn check_broadcast(table: &TableSpec, policy: &Policy, sync: &SyncPolicy) -> Result<(), String> {
    let axis = Axis::Broadcast;
    let (width, most) = (table.row_elements().max(1), limits::MAX_CHUNKS_OF_ROWS);
    let rows_in_chunk = (policy.chunk_elements() as u64 / width).max(1);
    let chunks = (table.elements() / width).div_ceil(rows_in_chunk);
    if table.rows && chunks > most {
        return Err(format!(
            "it has {chunks} chunks, and of a table of rows that is broadcast at most {most} are listed with a version; use a larger {}",
            Axis::Chunk
        ));
    }
    if sync.model.version_needed(0).is_none() {
        return Err(format!(
            "where versions are broadcast a worker goes on by the version that it has, and `{sync}` needs to know more; use \
             bsp, ssp, asp or drop, or {axis}=none"
        ));
    }
    if sync.names_cache() {
        return Err(format!(
            "`{sync}`: `cache` is about parameters that are pulled, and has no effect where versions are broadcast; leave `cache` \
             out, or use {axis}=none"
        ));
    }
    if !sync.overlap {
        return Err(format!(
            "`{sync}` holds pulls back until all have pushed, and there are no pulls where versions are broadcast; leave \
             out `overlap=false`, or use {axis}=none"
        ));
    }
    Ok(())
}

/// Whether workers can make local steps on a table. They have it whole, and each fragment is pushed and answered by itself.
fn check_local(
    table: &TableSpec,
    policy: &Policy,
    sync: &SyncPolicy,
    registry: &Registry,
) -> Result<(), String> {
    let local = format!("{}={}", Axis::Local, policy.get(Axis::Local));
    if table.rows {
        return Err(format!(
            "{local}: workers step whole tables by themselves, and of a table of rows they have single rows; leave out `{}`",
            Axis::Local
        ));
    }
    if sync.partial_pull().is_some() {
        return Err(format!(
            "{local}: b and tau2 of `{sync}` are about the parameters of all tables at once, and fragments are synchronised one by \
             one; leave b and tau2 out"
        ));
    }
    if sync.model.catches_up() {
        return Err(format!(
            "{local}: under `{sync}` slow workers leave rounds out, and all workers' fragments have their turns by rounds; use `drop` \
             or `ssp`"
        ));
    }
    if !sync.overlap {
        return Err(format!(
            "{local}: `{sync}` holds answers back until all tables are pushed, and fragments are pushed one by one; leave out \
             `overlap=false`"
        ));
    }
    let pushes = policy.codecs(registry).map_err(|error| error.to_string())?.push;
    if pushes.needs_offered_factors() {
        return Err(format!(
            "{local}: `{pushes}` sends the factors of one batch's gradient, and a pseudo-gradient of several steps has none; use \
             `powersgd:rank=4`, which finds some, or another codec"
        ));
    }
    let optimizer = policy.optimizer(registry).map_err(|error| error.to_string())?;
    if optimizer.assigns() {
        return Err(format!(
            "{local}: what is pushed are differences, and `{optimizer}` would take them for parameters; use `{}`",
            local::OUTER
        ));
    }
    Ok(())
}

/// Whether updates of a table can be held back: several become one, which is sent late.
fn check_hold(hold: &Hold, policy: &Policy, registry: &Registry) -> Result<(), String> {
    let axis = Axis::Hold;
    if policy.is_broadcast() && hold.asks_to_hold_pulls() {
        return Err(format!(
            "{axis}={hold}: servers broadcast its versions, and nobody asks for them; leave out `pulls=on`"
        ));
    }
    if policy.is_local() {
        return Err(format!(
            "{axis}={hold}: with {}={} workers synchronise now and then by themselves; leave out one of the two",
            Axis::Local,
            policy.get(Axis::Local)
        ));
    }
    let optimizer = policy.optimizer(registry).map_err(|error| error.to_string())?;
    if optimizer.assigns() {
        return Err(format!(
            "{axis}={hold}: parameters become what is pushed (`{optimizer}`), and updates that are held back are added up; use {axis}=none"
        ));
    }
    Ok(())
}

/// Whether all layers of a pack have the policy that its first one has.
fn check_pack(
    table: &TableSpec,
    server: ServerId,
    policy: &Policy,
    (job, overrides): (&Policy, &[PolicyOverride]),
) -> Result<(), String> {
    let [first, others @ ..] = &table.layers[..] else { return Ok(()) };
    let rules = |layer: &Layer| -> Vec<&PolicyOverride> {
        overrides.iter().filter(|rule| rule.is_for(&layer.name, server)).collect()
    };
    let of_first = rules(first);
    for layer in others {
        let own = rules(layer);
        if own == of_first {
            continue;
        }
        let base = job.clone().under(table.policy.clone());
        let other = own.into_iter().fold(base, |policy, rule| policy.under(rule.policies.clone()));
        if let Some(axis) = Axis::all().find(|axis| other.get(*axis) != policy.get(*axis)) {
            return Err(format!(
                "its layers `{}` and `{}` have {axis}={} and {axis}={}; layers of one table have the same policies: pack \
                 them apart",
                first.name,
                layer.name,
                policy.get(axis),
                other.get(axis)
            ));
        }
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
            ("local steps", with(Axis::Local, "steps:h=4"), &all[..1], None),
            (
                "local steps and factors",
                JobConfig {
                    policy: with(Axis::Local, "steps:h=4").policy.with(Axis::Codec, "factors+f16"),
                    ..job()
                },
                &all[..1],
                Some("a pseudo-gradient of several steps has none"),
            ),
            (
                "local steps and factors that are found",
                JobConfig {
                    policy: with(Axis::Local, "steps:h=4").policy.with(Axis::Codec, "powersgd:rank=1"),
                    ..job()
                },
                &all[..1],
                None,
            ),
            (
                "local steps in rounds that workers leave out",
                JobConfig {
                    policy: with(Axis::Local, "steps:h=4").policy.with(Axis::Sync, "quorum:q=0.75"),
                    ..job()
                },
                &all[..1],
                Some("slow workers leave rounds out"),
            ),
            ("held updates", with(Axis::Hold, "variance:2"), all, None),
            (
                "held updates of local steps",
                JobConfig {
                    policy: with(Axis::Local, "steps:h=4").policy.with(Axis::Hold, "variance:2"),
                    ..job()
                },
                &all[..1],
                Some("hold=variance:2: with local=steps:h=4 workers synchronise now and then by themselves"),
            ),
            (
                "held updates of what is assigned",
                JobConfig {
                    policy: with(Axis::Optimizer, "assign").policy.with(Axis::Hold, "variance:2"),
                    ..job()
                },
                &all[..1],
                Some("parameters become what is pushed"),
            ),
            (
                "held pulls of what is broadcast",
                JobConfig {
                    policy: with(Axis::Broadcast, "star").policy.with(Axis::Hold, "variance:2,pulls=on"),
                    ..job()
                },
                &all[..1],
                Some("nobody asks for them; leave out `pulls=on`"),
            ),
            (
                "held updates of what is broadcast",
                JobConfig {
                    policy: with(Axis::Broadcast, "star").policy.with(Axis::Hold, "variance:2"),
                    ..job()
                },
                &all[..1],
                None,
            ),
            (
                "local steps of rows",
                with(Axis::Local, "steps:h=4"),
                all,
                Some("of a table of rows they have single"),
            ),
        ] {
            let found = job.check_tables(&registry, tables).err().map(|error| error.to_string());
            assert_eq!(found.is_some(), words.is_some(), "{what}: {found:?}");
            assert!(found.unwrap_or_default().contains(words.unwrap_or_default()), "{what}");
        }
        for (sync, is_refused) in
            [("ssp:s=3", false), ("ssp:s=3,cache=on", true), ("ssp:s=3,cache=off", true)]
        {
            let job =
                JobConfig { policy: with(Axis::Sync, sync).policy.with(Axis::Broadcast, "star"), ..job() };
            let found = job.check_tables(&registry, &all[..1]).err().map(|error| error.to_string());
            assert_eq!(found.is_some(), is_refused, "{sync}: {found:?}");
            let words =
                if is_refused { "has no effect where versions are broadcast; leave `cache` out" } else { "" };
            assert!(found.unwrap_or_default().contains(words), "{sync}");
        }
        let late = JobConfig {
            policy: with(Axis::Sync, partial).policy.with(Axis::AnswerCodec, differences),
            ..job()
        };
        let error = late.check(&registry).unwrap_err().to_string();
        assert!(error.contains("drops late answers"), "{error}");
        let one_server = PolicyOverride { server: Some(ServerId(1)), ..rule(Axis::Sync, partial) };
        let apart = JobConfig { overrides: vec![one_server], ..job() };
        assert_eq!(apart.check_tables(&registry, &all[..1]), Ok(()), "workers know each server's model");
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
    fn tables_whose_policies_need_whole_layers_are_not_cut() {
        let registry = Registry::builtin();
        let tables = ["a", "b"].map(|name| TableSpec::dense(name, [8]));
        let whole = |job: JobConfig| job.whole_tables(&registry, &tables);
        assert_eq!(whole(job()), []);
        for (axis, text) in [
            (Axis::Optimizer, "lars:lr=0.1"),
            (Axis::Optimizer, "adam:clip=1"),
            (Axis::Codec, "powersgd:rank=1"),
            (Axis::Codec, "factors"),
        ] {
            assert_eq!(whole(with(axis, text)), [TableId(0), TableId(1)], "{text}");
        }
        assert_eq!(whole(with(Axis::Codec, "topk:0.1")), []);
        // On some server is enough: the strategy decides where the table is.
        let lars = || Policies::of([(Axis::Optimizer, "lars:lr=0.1")]);
        let rule = PolicyOverride::new("b", lars()).on(ServerId(1));
        assert_eq!(whole(JobConfig { overrides: vec![rule], ..job() }), [TableId(1)]);
        let own = [tables[0].clone(), TableSpec { policy: lars(), ..tables[1].clone() }];
        assert_eq!(job().whole_tables(&registry, &own), [TableId(1)]);
    }

    #[test]
    fn layers_of_a_pack_have_the_same_policies() {
        let registry = Registry::builtin();
        let layer = |name: &str, start| Layer { name: name.into(), start, shape: vec![4] };
        let layers = vec![layer("conv.bias", 0), layer("fc.bias", 4)];
        let pack = [TableSpec { layers, ..TableSpec::dense("conv.bias and 1 more", [8]) }];
        let check = |rules: &[(&str, &str)]| {
            let rule = |(table, codec): &(&str, &str)| {
                PolicyOverride::new(*table, Policies::of([(Axis::Codec, *codec)]))
            };
            JobConfig { overrides: rules.iter().map(rule).collect(), ..job() }.check_tables(&registry, &pack)
        };
        assert_eq!(check(&[("*.bias", "f16")]), Ok(()));
        assert_eq!(check(&[("conv*", "f16"), ("fc*", "f16")]), Ok(()), "the same by other ways");
        assert_eq!(check(&[("conv*", "topk:0.1"), ("*", "f16")]), Ok(()), "the last one wins");
        let why = check(&[("fc*", "f16")]).unwrap_err().to_string();
        assert!(why.contains("`conv.bias` and `fc.bias` have codec=none and codec=f16"), "{why}");
        let why = check(&[("*and 1 more", "f16")]).unwrap_err().to_string();
        assert!(why.contains("no table matches; the job has conv.bias, fc.bias"), "{why}");
    }
}
