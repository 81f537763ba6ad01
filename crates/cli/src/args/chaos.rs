//! The options of `paramill chaos`.

use super::JobArgs;
use crate::commands::ChaosKind;
use crate::duration::Span;
use clap::Args as ClapArgs;
use std::path::PathBuf;

/// Run a job, kill its processes at random and start them anew, and check that nothing was lost.
///
/// The job runs as processes of this machine. They are killed with SIGKILL at moments that follow from --seed; a second server only when the
/// job's status says that every shard has its copy again. `tags` counts: acknowledged pushes that were lost, and pushes that were applied
/// twice. The others train, and their metric is compared with that of the same job without kills. Exit code 3 tells that something was lost or
/// applied twice, 4 that nothing moved for a minute.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  paramill chaos tags --minutes 1
  paramill chaos tags --kill workers,coordinator --sync asp --seed 7 --json
  paramill chaos lr --data a9a.gz --test a9a.t.gz --minutes 10")]
pub(crate) struct ChaosArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// How long processes are killed; the job ends some time later.
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0, help_heading = "Chaos")]
    pub(crate) minutes: f64,
    /// What is killed [default: all kinds of processes of the job; servers where they have replicas].
    #[arg(long, value_name = "KINDS", value_delimiter = ',', help_heading = "Chaos")]
    pub(crate) kill: Vec<ChaosKind>,
    /// The mean time between two kills.
    #[arg(long, value_name = "TIME", default_value = "4500ms", help_heading = "Chaos")]
    pub(crate) every: Span,
}

/// A worker process of `chaos tags`.
#[derive(Debug, ClapArgs)]
pub(crate) struct ChaosProcessArgs {
    /// The folder of the journals.
    pub(crate) folder: PathBuf,
}
