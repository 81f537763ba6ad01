//! Lines for whoever watches a job: the one way in which Paramill writes to stderr.

use std::fmt;
use std::io::Write;

/// Writes a line to stderr. `eprintln!` panics when its reader is gone or its disk full, and a job must not end by that: the
/// line is lost, and the job goes on.
pub fn line(text: impl fmt::Display) {
    // One write for the whole line, so that those of several threads and processes do not mix.
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// A line of a role's log, where the application does not take it.
pub(crate) fn log(text: &str) {
    line(format_args!("paramill: {text}"));
}
