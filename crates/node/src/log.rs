//! Where lines about a job go.

use crate::stderr;
use std::fmt;
use std::sync::Arc;

pub use paramill_core::role::Level;

/// Takes the lines that a role writes about its job. The role's thread calls it, and waits for it.
///
/// ```
/// use paramill_node::{Level, Log};
///
/// let log = Log::new(|level, line| {
///     if level >= Level::Warn {
///         paramill_node::stderr::line(format_args!("{level:?}: {line}"));
///     }
/// });
/// # drop(log);
/// ```
#[derive(Clone)]
pub struct Log(Arc<Take>);

type Take = dyn Fn(Level, &str) + Send + Sync;

impl Log {
    /// Hands lines to a closure.
    pub fn new(take: impl Fn(Level, &str) + Send + Sync + 'static) -> Log {
        Log(Arc::new(take))
    }

    /// Writes lines to stderr, as `paramill: LINE`. The default.
    pub fn stderr() -> Log {
        Log::new(|_, line| stderr::line(format_args!("paramill: {line}")))
    }

    /// Drops lines.
    pub fn none() -> Log {
        Log::new(|_, _| {})
    }

    /// Hands over a line.
    pub fn line(&self, level: Level, line: &str) {
        (self.0)(level, line);
    }
}

impl Default for Log {
    fn default() -> Log {
        Log::stderr()
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Log")
    }
}
