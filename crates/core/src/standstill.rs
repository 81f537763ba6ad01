//! Notices that a node itself stood still: it was stopped, suspended, migrated or starved.
//!
//! Silence is measured by a clock that goes on while a node does not. A node that stood still did not read what its peers
//! sent, so that time does not count as their silence. Only that time is left out: a node that stands still again and again
//! still finds the peers that are dead.

use crate::limits;
use crate::types::Time;
use std::time::Duration;

/// Standstills within this time are told of in one line.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// For how long this process stood still in a wait that was to take `planned` and took `took`. Zero for a delay below
/// [`limits::STANDSTILL`], as the scheduler of a busy machine causes.
pub fn lost_time(planned: Duration, took: Duration) -> Duration {
    let late = took.saturating_sub(planned);
    if late >= limits::STANDSTILL { late } else { Duration::ZERO }
}

/// Moves the beginning of a silence by the time that was lost before `now`, so that this time does not count.
pub(crate) fn exclude(since: &mut Time, now: Time, lost: Duration) {
    // A silence that began while the time was lost, or after it, cannot have begun later than now.
    *since = (*since + lost).min(now).max(*since);
}

/// Compares when a node wanted to be called with when it was called.
#[derive(Debug, Clone, Default)]
pub(crate) struct Standstill {
    /// When the node was called last; `None` before its first call.
    called: Option<Time>,
    /// Peers are not given up before this: what they sent while the node stood still is to be read first.
    judges_from: Time,
    /// Lost time that [`Standstill::poll_untold`] has not returned yet.
    untold: Duration,
    tell_at: Time,
}

impl Standstill {
    /// To be asked first in every `handle_timeout`: for how long the node stood still, if it did.
    pub(crate) fn noticed(&mut self, now: Time) -> Option<Duration> {
        let took = self.called.map_or(Duration::ZERO, |called| now.since(called));
        self.called = Some(now);
        let lost = lost_time(limits::HEARTBEAT_EVERY, took);
        if lost.is_zero() {
            return None;
        }
        self.judges_from = now + limits::WAKE_GRACE;
        self.untold += lost;
        Some(lost)
    }

    /// When a silence since `since` has lasted for `grace`. The caller excludes lost time from `since`.
    pub(crate) fn deadline(&self, since: Time, grace: Duration) -> Time {
        (since + grace).max(self.judges_from)
    }

    /// How much time was lost since this last said so, if it is time to say so again.
    pub(crate) fn poll_untold(&mut self, now: Time) -> Option<Duration> {
        if self.untold.is_zero() || now < self.tell_at {
            return None;
        }
        self.tell_at = now + TELL_EVERY;
        Some(std::mem::take(&mut self.untold))
    }

    /// When [`Standstill::noticed`] wants to be asked again, by a node that judges others' silence.
    pub(crate) fn next_timeout(&self) -> Time {
        self.called.map_or(Time::ZERO, |called| called + limits::HEARTBEAT_EVERY)
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

    #[test]
    fn a_peer_is_not_given_up_right_after_a_standstill() {
        let mut standstill = Standstill::default();
        let began = Time::from_secs_f64(1000.0);
        let (mut since, grace) = (began, Duration::from_secs(10));
        standstill.noticed(began);
        let woken = standstill.next_timeout() + Duration::from_secs(60);
        let lost = standstill.noticed(woken).unwrap();
        exclude(&mut since, woken, lost);
        assert_eq!(standstill.deadline(since, grace), woken + (grace - limits::HEARTBEAT_EVERY));
        // One whose time was over but for a moment has time to be heard.
        assert_eq!(standstill.deadline(since, limits::HEARTBEAT_EVERY), woken + limits::WAKE_GRACE);
        let mut heard = woken;
        exclude(&mut heard, woken, lost);
        assert_eq!(heard, woken, "what was heard after waking up is not moved into the future");
    }
}
