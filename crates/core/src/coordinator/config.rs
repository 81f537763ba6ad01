//! A job as its owner describes it.

use crate::codec::Codec;
use crate::consistency::SyncPolicy;
use crate::limits;
use crate::optimizer::OptimizerPolicy;
use crate::registry::Registry;
use crate::spec::{Spec, SpecError};
use crate::table::{PolicyOverride, TablePolicy};
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
    /// Placement, in text form.
    pub placement: String,
    /// Policies of every table.
    pub policy: TablePolicy,
    /// Exceptions from them.
    pub overrides: Vec<PolicyOverride>,
    /// Elements per chunk.
    pub chunk_elements: u32,
    /// Everything random follows from it.
    pub seed: u64,
    /// A worker that is silent for this long is declared dead.
    pub worker_timeout: Duration,
}

impl JobConfig {
    /// A job with the defaults of everything but its size.
    pub fn new(job: impl Into<String>, workers: u32, servers: u32) -> JobConfig {
        JobConfig {
            job: job.into(),
            workers,
            servers,
            placement: "heuristic".into(),
            policy: TablePolicy::default(),
            overrides: Vec::new(),
            chunk_elements: limits::CHUNK_ELEMENTS as u32,
            seed: 0,
            worker_timeout: limits::WORKER_TIMEOUT,
        }
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
        range("chunk elements", self.chunk_elements.into(), limits::MAX_CHUNK_ELEMENTS as u64)?;
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
        registry.placement.build(&Spec::parse(&self.placement)?)?;
        OptimizerPolicy::parse(&registry.optimizer, &self.policy.optimizer)?;
        let sync = SyncPolicy::parse(&registry.consistency, &self.policy.sync)?;
        Codec::parse(&registry.codec, &self.policy.codec)?;
        let answers = Codec::for_answers(&registry.codec, &self.policy.answer_codec)?;
        check_answers(&answers, &sync)?;
        self.overrides.iter().try_for_each(|rule| check_rule(registry, rule, sync.overlap))
    }

    /// Whether an exception from the job's policies can be made. The job must have passed [`JobConfig::check`].
    pub(super) fn check_rule(&self, registry: &Registry, rule: &PolicyOverride) -> Result<(), SpecError> {
        check_rule(registry, rule, SyncPolicy::parse(&registry.consistency, &self.policy.sync)?.overlap)
    }
}

/// Answers that are differences build on each other: none may be left out.
pub(super) fn check_answers(answers: &Codec, sync: &SyncPolicy) -> Result<(), SpecError> {
    match answers.is_for_differences() && sync.model.partial_pull().is_some() {
        true => Err(SpecError::Parameter {
            component: answers.to_string(),
            why: format!("`{sync}` drops late answers, and these are differences, each of which counts"),
        }),
        false => Ok(()),
    }
}

fn check_rule(registry: &Registry, rule: &PolicyOverride, overlap: bool) -> Result<(), SpecError> {
    let fault = |why: String| Err(SpecError::Parameter { component: "job".into(), why });
    if let Err(why) = rule.check() {
        return fault(why);
    }
    if let Some(optimizer) = &rule.optimizer {
        OptimizerPolicy::parse(&registry.optimizer, optimizer)?;
    }
    if rule.server.is_some() && (rule.codec.is_some() || rule.answer_codec.is_some()) {
        return fault("a codec is the same on all servers of a table: leave out `server`".into());
    }
    if let Some(codec) = &rule.codec {
        Codec::parse(&registry.codec, codec)?;
    }
    let answers =
        rule.answer_codec.as_ref().map(|text| Codec::for_answers(&registry.codec, text)).transpose()?;
    if let (Some(answers), Some(sync)) = (&answers, &rule.sync) {
        check_answers(answers, &SyncPolicy::parse(&registry.consistency, sync)?)?;
    }
    match &rule.sync {
        // The scheduler between push and pull is the whole job's.
        Some(sync) if SyncPolicy::parse(&registry.consistency, sync)?.overlap != overlap => {
            fault(format!("`{sync}`: `overlap` is the same for all tables of a job"))
        }
        _ => Ok(()),
    }
}
