//! The options that describe a job, shared by the commands that run or print one.

use crate::duration::Span;
use clap::builder::PossibleValuesParser;
use clap::error::ErrorKind;
use clap::{Arg, ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use paramill_core::policy::{Axis, Info, Policies, Text};
use paramill_node::Transport;
use paramill_node::rate::Rate;
use std::path::PathBuf;

/// A job as far as it was typed. Nothing here has a default: a config file may say it.
#[derive(Debug, Default, ClapArgs)]
pub(crate) struct JobArgs {
    /// What to train: lr, mf, mlp or cnn [default: mlp].
    pub(crate) workload: Option<String>,
    /// Training data, plain or gzip: a libsvm file (lr), a CSV of user,item,rating (mf), a folder of idx files (mlp, cnn). Made from the seed when not given.
    #[arg(long, value_name = "PATH", help_heading = "Workload")]
    pub(crate) data: Option<PathBuf>,
    /// Held-out data of the same kind; a part of --data is held out when not given.
    #[arg(long, value_name = "PATH", help_heading = "Workload")]
    pub(crate) test: Option<PathBuf>,
    /// Times to go through the data [default: the workload's].
    #[arg(long, value_name = "E", help_heading = "Workload")]
    pub(crate) epochs: Option<u64>,
    /// Examples in a worker's batch [default: the workload's].
    #[arg(long, value_name = "B", help_heading = "Workload")]
    pub(crate) batch: Option<usize>,
    /// Train on at most this many examples, or make this many.
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub(crate) examples: Option<usize>,
    /// Everything random follows from it [default: 1].
    #[arg(long, value_name = "K", help_heading = "Workload")]
    pub(crate) seed: Option<u64>,
    /// Workers [default: 4].
    #[arg(long, value_name = "N", help_heading = "Cluster")]
    pub(crate) workers: Option<u32>,
    /// Servers [default: 2].
    #[arg(long, value_name = "M", help_heading = "Cluster")]
    pub(crate) servers: Option<u32>,
    /// Copies of every shard that are kept on other servers, 0 or 1: with one the job survives the death of a server other than the
    /// first. Needs --processes [default: 0].
    #[arg(long, value_name = "R", help_heading = "Cluster")]
    pub(crate) replicas: Option<u32>,
    /// A worker or server that lives and makes no progress for so long while others wait for it is left behind: a worker is declared dead, a
    /// server's copies take over. Needs --processes [default: it is only named].
    #[arg(long, value_name = "TIME", help_heading = "Cluster")]
    pub(crate) progress_timeout: Option<Span>,
    /// Data cores of each server [default: by the CPUs that the job's servers and workers share].
    #[arg(long, value_name = "K", help_heading = "Cluster")]
    pub(crate) cores: Option<u32>,
    /// Aggregators that workers go through, shared out by rank [default: none].
    #[arg(long, value_name = "A", help_heading = "Cluster")]
    pub(crate) aggregators: Option<u32>,
    /// Run every worker and server as a process of its own.
    #[arg(long, value_name = "BOOL", help_heading = "Cluster", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true)]
    pub(crate) processes: Option<bool>,
    /// How these processes exchange gradients and parameters: auto, tcp or shm [default: auto, which is shared memory].
    #[arg(long, value_name = "T", help_heading = "Cluster")]
    pub(crate) transport: Option<Transport>,
    /// What each of these processes sends at most, such as 800Mbit: a leaky bucket for each. Needs --processes and --transport tcp,
    /// which is the default with it [default: no limit].
    #[arg(long, value_name = "RATE", help_heading = "Cluster")]
    pub(crate) rate: Option<Rate>,
    /// Which hosts are below which switches, in TOML, for the trees of --broadcast.
    #[arg(long, value_name = "FILE", help_heading = "Cluster")]
    pub(crate) topology: Option<PathBuf>,
    /// Give up on a wait that lasts longer, and name who is waited for [default: 1m].
    #[arg(long, value_name = "TIME", help_heading = "Cluster")]
    pub(crate) timeout: Option<Span>,
    /// A fault to try, such as 'worker=2:slow=4x', 'pull:delay=4s,p=0.0016' or 'server=1:pause=2s@10s'; may be
    /// given several times.
    #[arg(long, value_name = "FAULT", help_heading = "Cluster")]
    pub(crate) inject: Vec<String>,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    /// A job in TOML, or `-` for stdin; options win over it. Policies of single tables are its `[[override]]` entries.
    #[arg(long, value_name = "FILE", help_heading = None)]
    pub(crate) config: Option<PathBuf>,
}

/// Policies as far as they were typed: an option for every axis.
#[derive(Debug, Clone, Default)]
pub(crate) struct PolicyArgs(pub(crate) Policies);

impl PolicyArgs {
    /// The same options, to be given to another process.
    pub(crate) fn as_arguments(&self) -> Vec<String> {
        self.0.iter().map(|(axis, text)| format!("--{}={text}", long(axis))).collect()
    }
}

impl FromArgMatches for PolicyArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<PolicyArgs, clap::Error> {
        let mut typed = PolicyArgs::default();
        typed.update_from_arg_matches(matches)?;
        Ok(typed)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for axis in Axis::all() {
            if let Some(text) = matches.get_one::<String>(axis.info().name) {
                let invalid = |error| clap::Error::raw(ErrorKind::ValueValidation, error);
                self.0.set(axis, text).map_err(invalid)?;
            }
        }
        Ok(())
    }
}

impl ClapArgs for PolicyArgs {
    fn augment_args(command: Command) -> Command {
        command.args(Axis::all().map(option))
    }

    fn augment_args_for_update(command: Command) -> Command {
        PolicyArgs::augment_args(command)
    }
}

fn option(axis: Axis) -> Arg {
    let Info { name, about, default, text, .. } = axis.info();
    // A job with a workload has its optimizer from that.
    let workload = if axis == Axis::Optimizer { "the workload's, or " } else { "" };
    let arg = Arg::new(*name)
        .long(long(axis))
        .help(format!("{about} [default: {workload}{default}]"))
        .help_heading("Policies (see `paramill components`)");
    match text {
        Text::Choice(choices) => arg.value_parser(PossibleValuesParser::new(*choices)),
        Text::Bytes => {
            let read = move |text: &str| Policies::default().set(axis, text).map(|()| text.to_owned());
            arg.value_name("BYTES").value_parser(read)
        }
        Text::Component(_) => arg.value_name("TEXT"),
    }
}

/// The option of an axis, without its dashes.
fn long(axis: Axis) -> String {
    axis.info().name.replace('_', "-")
}
