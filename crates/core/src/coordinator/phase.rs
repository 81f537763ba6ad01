//! How far a job is, in words.

use super::JobConfig;
use super::epochs::Epochs;
use super::readers::Readers;
use super::servers::Servers;
use super::vacancy::Vacancy;
use super::workers::Workers;
use crate::status::MemberState;
use std::fmt;

/// How far a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Members are missing, or shards have not entered the plan.
    Starting,
    /// Workers have the plan.
    Running,
    Over,
}

/// What a sentence about a job's phase, or what it waits for, is made of.
#[derive(Debug)]
pub(super) struct Phase<'a> {
    pub(super) stage: Stage,
    /// Why the job is over, if it failed.
    pub(super) failure: Option<&'a str>,
    pub(super) config: &'a JobConfig,
    pub(super) workers: &'a Workers,
    pub(super) readers: &'a Readers,
    pub(super) servers: &'a Servers,
    pub(super) epochs: Option<&'a Epochs>,
    pub(super) vacancy: Option<&'a Vacancy>,
}

impl fmt::Display for Phase<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.stage, self.epochs) {
            (Stage::Over, _) => match self.failure {
                Some(why) => write!(f, "over: {why}"),
                None if self.workers.count(MemberState::Dead) > 0 => {
                    f.write_str("over: all workers left or died")
                }
                None => f.write_str("over: all workers left"),
            },
            (Stage::Running, _) => {
                let running = self.workers.count(MemberState::Running);
                let others = [(MemberState::Joining, "joining"), (MemberState::Dead, "declared dead")];
                let others = others.map(|(state, word)| (self.workers.count(state), word));
                let others = others.iter().filter(|(count, _)| *count > 0);
                let others: String = others.map(|(count, word)| format!("; {count} {word}")).collect();
                let readers = self.readers.words();
                let missing = self.vacancy.map(Vacancy::words).unwrap_or_default();
                let unsettled = self.epochs.and_then(Epochs::why_unsettled);
                let unsettled = unsettled.map(|why| format!("; {why}")).unwrap_or_default();
                write!(f, "running with {running} workers{others}{readers}{missing}{unsettled}")
            }
            (Stage::Starting, Some(epochs)) => {
                let (ready, shards) = (epochs.entered_count(), epochs.newest().shards.len());
                write!(f, "starting: {ready} of {shards} data cores are ready")
            }
            (Stage::Starting, None) => write!(
                f,
                "waiting: {} of {} workers and {} of {} servers are here",
                self.workers.declared_count(),
                self.config.workers,
                self.servers.complete_count(),
                self.config.servers
            ),
        }
    }
}
