//! What worker processes have done, those that died and were started anew included.

use super::worker::Work;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The last words of every process that made steps.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// By the number of the process.
    lives: BTreeMap<usize, Life>,
}

#[derive(Debug)]
struct Life {
    began: Instant,
    work: Work,
}

impl Tally {
    /// A process that began `elapsed` seconds ago says what it has done. Returns when it began, in seconds since the first one did.
    pub(super) fn hear(&mut self, process: usize, now: Instant, elapsed: f64, work: Work) -> f64 {
        let elapsed = Duration::try_from_secs_f64(elapsed).unwrap_or_default();
        // Words may be read late: the earliest beginning that follows from any of them is the closest.
        let began = now.checked_sub(elapsed).unwrap_or(now);
        let life = self.lives.entry(process).or_insert(Life { began, work });
        life.began = life.began.min(began);
        life.work = work;
        let began = life.began;
        self.first().map_or(0.0, |first| began.saturating_duration_since(first).as_secs_f64())
    }

    /// What all of them have done, from the beginning of the first to the end of the last.
    pub(super) fn total(&self) -> Work {
        let Some(first) = self.first() else { return Work::default() };
        let since = |life: &Life| {
            let began = life.began.saturating_duration_since(first).as_secs_f64();
            Work { seconds: began + life.work.seconds, ..life.work }
        };
        self.lives.values().map(since).fold(Work::default(), Work::beside)
    }

    fn first(&self) -> Option<Instant> {
        self.lives.values().map(|life| life.began).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paramill_core::status::ReadsReport;

    fn work(steps: u64, seconds: f64) -> Work {
        let bytes_relayed = 2 * steps;
        let reads = ReadsReport { at_once: steps, ..ReadsReport::default() };
        Work {
            steps,
            seconds,
            bytes_pushed: 10 * steps,
            bytes_pulled: steps,
            bytes_relayed,
            reads,
            updates: None,
        }
    }

    #[test]
    fn work_of_processes_that_died_counts_up_to_their_last_words() {
        let (mut tally, start) = (Tally::default(), Instant::now());
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        assert_eq!(tally.hear(3, at(1.0), 1.0, work(10, 1.0)), 0.0);
        tally.hear(4, at(1.0), 1.0, work(10, 1.0));
        tally.hear(4, at(2.0), 2.0, work(20, 2.0));
        // Process 3 died; the one that took its place began at second 6, had no step left to make, and waited for a second.
        assert_eq!(tally.hear(5, at(7.0), 1.0, work(0, 0.0)), 6.0);
        let total = tally.total();
        assert_eq!((total.steps, total.bytes_pushed, total.bytes_pulled), (30, 300, 30));
        assert_eq!((total.bytes_relayed, total.reads.at_once), (60, 30));
        assert_eq!(total.seconds, 6.0);
    }

    #[test]
    fn words_that_are_read_late_do_not_move_the_beginning() {
        let (mut tally, late) = (Tally::default(), Instant::now() + Duration::from_secs(9));
        tally.hear(1, late, 1.0, work(1, 1.0));
        tally.hear(1, late, 5.0, work(5, 5.0));
        tally.hear(2, late, 5.0, work(9, 5.0));
        assert_eq!((tally.total().steps, tally.total().seconds), (14, 5.0));
        assert_eq!(Tally::default().total().steps, 0);
    }
}
