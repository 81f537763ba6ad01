//! Notices that a node itself stood still: it was stopped, suspended, migrated or starved.
//!
//! Silence is measured by a clock that goes on while a node does not. A node that was not called for a while did not read
//! what its peers sent either, so it must not take its own absence for theirs: they get a fresh grace period.

use crate::limits;
use crate::types::Time;
use std::time::Duration;

/// Compares when a node wanted to be called with when it was called.
#[derive(Debug, Clone, Default)]
pub(crate) struct Standstill {
    /// When the node wants to be called next; `None` before its first call.
    due: Option<Time>,
}

impl Standstill {
    /// To be asked first in every `handle_timeout`: for how long the node stood still, if it did.
    pub(crate) fn noticed(&mut self, now: Time) -> Option<Duration> {
        let late = self.due.map_or(Duration::ZERO, |due| now.since(due));
        self.due = Some(now + limits::HEARTBEAT_EVERY);
        (late >= limits::STANDSTILL).then_some(late)
    }

    /// When [`Standstill::noticed`] wants to be asked again, by a node that judges others' silence.
    pub(crate) fn next_timeout(&self) -> Time {
        self.due.unwrap_or(Time::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_call_that_comes_late_is_a_standstill() {
        let mut standstill = Standstill::default();
        let mut now = Time::from_secs_f64(1000.0);
        assert_eq!(standstill.noticed(now), None, "nothing was due before the first call");
        for _ in 0..3 {
            now = standstill.next_timeout() + limits::STANDSTILL / 2;
            assert_eq!(standstill.noticed(now), None);
            assert_eq!(standstill.noticed(now), None, "a call that comes early does no harm");
        }
        now = standstill.next_timeout() + Duration::from_secs(12);
        assert_eq!(standstill.noticed(now), Some(Duration::from_secs(12)));
        assert_eq!(standstill.noticed(standstill.next_timeout()), None);
    }
}
