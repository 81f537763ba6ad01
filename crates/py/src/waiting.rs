//! Waits that let go of the interpreter and can be interrupted.

use paramill_core::standstill;
use paramill_node::client::ClientError;
use pyo3::prelude::*;
use std::time::{Duration, Instant};

/// How long the coordinator may take to answer a question, or to change a policy.
pub(crate) const ADMIN_DEADLINE: Duration = Duration::from_secs(10);

/// How long a signal may go unnoticed.
const LOOK_UP_EVERY: Duration = Duration::from_millis(100);

/// Waits until `is_due_within` says so, or the time is over. Either way the caller asks for the outcome next.
pub(crate) fn until_due(
    py: Python<'_>,
    timeout: Duration,
    mut is_due_within: impl FnMut(Duration) -> PyResult<bool> + Send,
) -> PyResult<()> {
    let mut left = timeout;
    loop {
        let (slice, began) = (left.min(LOOK_UP_EVERY), Instant::now());
        if py.detach(|| is_due_within(slice))? || left.is_zero() {
            return Ok(());
        }
        py.check_signals()?;
        // Time in which this process stood still is not one in which nothing came.
        let passed = began.elapsed();
        left = left.saturating_sub(passed - standstill::lost_time(slice, passed));
    }
}

/// Threads do not survive a fork: whatever was asked of a copy of the worker of `process` would wait for ever.
pub(crate) fn check_process(process: u32) -> PyResult<()> {
    let own = std::process::id();
    if process == own {
        return Ok(());
    }
    let why = format!(
        "this job was joined by process {process}, and a fork of it ({own}) cannot use it; start processes with \
         multiprocessing's `spawn`, or call paramill.init in the child"
    );
    Err(crate::errors::raise("ForkError", why))
}

/// A time-out of the last look names the whole wait.
pub(crate) fn timed(error: ClientError, timeout: Duration) -> ClientError {
    match error {
        ClientError::Timeout { what, .. } => ClientError::Timeout { seconds: timeout.as_secs_f64(), what },
        other => other,
    }
}

/// Seconds as Python gives them. What is no time is an error; what is too long for a clock is for ever.
pub(crate) fn duration(seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(crate::errors::raise(
            "ParamillError",
            format!("a timeout of {seconds} s: expected 0 or more"),
        ));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::from_secs(u64::from(u32::MAX))))
}
