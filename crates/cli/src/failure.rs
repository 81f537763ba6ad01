//! How the command can fail, and the exit code that says so: 1 at run time, 2 for bad usage, 130 for Ctrl-C.

use paramill_node::stderr;
use std::io;
use std::process::ExitCode;

/// The exit code of a process that was interrupted: 128 and the number of the signal.
pub(crate) const INTERRUPTED: u8 = 130;

/// Why the command did not do what was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line or a file it names cannot be meant; nothing was started.
    Usage(anyhow::Error),
    /// It was meant and it went wrong.
    Run(anyhow::Error),
    /// A search found what it was looking for, of a kind that has an exit code of its own.
    Found {
        /// The exit code.
        code: u8,
        /// What to do next.
        what: String,
    },
}

impl Failure {
    /// Says on stderr what happened and chooses the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        match self {
            Failure::Run(error) if is_closed_pipe(error) => ExitCode::SUCCESS,
            Failure::Run(error) => {
                stderr::line(format_args!("error: {error:#}"));
                ExitCode::from(1)
            }
            Failure::Usage(error) => {
                stderr::line(format_args!("error: {error:#}"));
                ExitCode::from(2)
            }
            Failure::Found { code, what } => {
                stderr::line(what);
                ExitCode::from(*code)
            }
        }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Run(error.into())
    }
}

/// Marks an error as the fault of what was typed.
pub(crate) trait OrUsage<T> {
    /// The same, but a failure is bad usage.
    fn or_usage(self) -> Result<T, Failure>;
}

impl<T, E: Into<anyhow::Error>> OrUsage<T> for Result<T, E> {
    fn or_usage(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::Usage(error.into()))
    }
}

/// `paramill ... | head` has read what it wanted; that is no failure.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let cause = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>());
    cause.is_some_and(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}
