//! The driver's time: nanoseconds since the process first asked.

use paramill_core::types::Time;
use std::sync::OnceLock;
use std::time::Instant;

static ZERO: OnceLock<Instant> = OnceLock::new();

/// The time since this process began, as faults of it count it.
pub fn process_time() -> Time {
    now()
}

/// Now, on a clock that never goes back.
pub(crate) fn now() -> Time {
    let zero = *ZERO.get_or_init(Instant::now);
    Time::ZERO + zero.elapsed()
}
