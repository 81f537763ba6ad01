//! The moment at which a shard that moves can rest.

use crate::limits::{MOVE_PATIENCE, MOVE_WAIT};
use crate::types::Time;

/// Waits for the moment at which least is sent twice: a round has closed while this was waited for, and its answers have left. Workers
/// compute from then on, and what they push next goes to the other server.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lull {
    since: Time,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No round was open yet. Workers may be in the middle of a computation, and push before an image has arrived.
    Idle,
    /// A round is open.
    Open,
    /// It has closed, and its answers leave.
    Closed,
    /// The next round opens while they do: the exchange does not pause.
    Missed,
}

/// What a shard has to do with gradients.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rounds {
    /// A round is open, or a push is under way.
    pub(super) is_open: bool,
    /// Sums of gradients are kept.
    pub(super) has_sums: bool,
}

impl Lull {
    pub(super) fn new(now: Time) -> Lull {
        Lull { since: now, phase: Phase::Idle }
    }

    /// Whether the shard is to rest now. To be asked after everything that may open or close a round. It is silent when nothing waits
    /// to be sent.
    pub(super) fn is_here(&mut self, now: Time, rounds: Rounds, is_silent: bool) -> bool {
        self.phase = match (self.phase, rounds.is_open) {
            (Phase::Idle, true) => Phase::Open,
            (Phase::Open, false) => Phase::Closed,
            (Phase::Closed, true) => Phase::Missed,
            (phase, _) => phase,
        };
        let is_due = now >= self.deadline(rounds);
        is_due || self.phase == Phase::Missed || (self.phase == Phase::Closed && is_silent)
    }

    /// Whether the driver is to say when nothing waits to be sent.
    pub(super) fn awaits_silence(&self) -> bool {
        self.phase == Phase::Closed
    }

    /// When the shard rests at the latest. Without sums there is only a push to be sent again.
    pub(super) fn deadline(&self, rounds: Rounds) -> Time {
        let is_worth_more = rounds.has_sums || self.phase == Phase::Closed;
        self.since + if is_worth_more { MOVE_PATIENCE } else { MOVE_WAIT }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Rounds = Rounds { is_open: false, has_sums: false };
    const SUMS: Rounds = Rounds { is_open: true, has_sums: true };
    const PUSH: Rounds = Rounds { is_open: true, has_sums: false };

    #[test]
    fn a_shard_rests_when_a_round_has_closed_and_its_answers_have_left() {
        let mut lull = Lull::new(Time::ZERO);
        assert!(!lull.is_here(Time(1), NONE, true), "workers are in the middle of a computation");
        assert!(!lull.is_here(Time(2), SUMS, true));
        assert!(!lull.awaits_silence());
        assert!(!lull.is_here(Time(3), NONE, false));
        assert!(lull.awaits_silence());
        assert!(lull.is_here(Time(4), NONE, true));
    }

    #[test]
    fn a_round_that_is_slow_is_waited_for() {
        let mut lull = Lull::new(Time::ZERO);
        let too_late = Time::ZERO + MOVE_PATIENCE;
        let late = Time(too_late.0 - 1);
        assert!(!lull.is_here(Time(1), SUMS, false));
        assert!(!lull.is_here(late, SUMS, false));
        assert_eq!(lull.deadline(SUMS), too_late);
        assert!(lull.is_here(too_late, SUMS, false));
    }

    #[test]
    fn an_exchange_without_pauses_is_cut_between_two_rounds() {
        let mut lull = Lull::new(Time::ZERO);
        assert!(!lull.is_here(Time(1), SUMS, false));
        assert!(!lull.is_here(Time(2), NONE, false));
        assert!(lull.is_here(Time(3), PUSH, false));
    }

    #[test]
    fn neither_a_job_at_rest_nor_single_pushes_are_waited_for_for_long() {
        for rounds in [NONE, PUSH] {
            let mut lull = Lull::new(Time::ZERO);
            assert!(!lull.is_here(Time(1), rounds, false));
            assert!(lull.is_here(lull.deadline(rounds), rounds, false));
            assert_eq!(lull.deadline(rounds), Time::ZERO + MOVE_WAIT);
        }
    }
}
