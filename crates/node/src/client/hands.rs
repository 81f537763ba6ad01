//! Threads that copy and encode large gradients together.

use paramill_core::hands::Hands;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// More would wait for memory, and the event loops have work to do meanwhile.
const MOST: usize = 8;

/// The caller and threads that live as long as the gradient needs them: a gradient of some megabytes takes a hundred times
/// as long as starting them.
#[derive(Debug, Clone, Copy)]
pub struct Threads {
    count: usize,
}

/// How many jobs this process has.
static JOBS: AtomicUsize = AtomicUsize::new(0);

pub(super) fn job_begins() {
    JOBS.fetch_add(1, Ordering::Relaxed);
}

pub(super) fn job_ends() {
    JOBS.fetch_sub(1, Ordering::Relaxed);
}

impl Threads {
    /// So many, the caller among them.
    pub fn new(count: usize) -> Threads {
        Threads { count: count.max(1) }
    }

    /// As many as one of this process's jobs gets when all of them are busy.
    pub(super) fn of_one_job() -> Threads {
        Threads::of_one_of(JOBS.load(Ordering::Relaxed))
    }

    fn of_one_of(jobs: usize) -> Threads {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Threads::new((cores / jobs.max(1)).min(MOST))
    }
}

impl Hands for Threads {
    fn count(&self) -> usize {
        self.count
    }

    fn share(&self, pieces: usize, work: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        let help = || {
            loop {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                if piece >= pieces {
                    return;
                }
                work(piece);
            }
        };
        thread::scope(|scope| {
            // Where there are no more threads to be had, the others do their share.
            for _ in 1..self.count.min(pieces) {
                let _ = thread::Builder::new().name("paramill-encode".into()).spawn_scoped(scope, help);
            }
            help();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_worked_on_once() {
        for count in [1, 2, 7] {
            let pieces: Vec<AtomicUsize> = (0..20).map(|_| AtomicUsize::new(0)).collect();
            Threads { count }.share(pieces.len(), &|piece| _ = pieces[piece].fetch_add(1, Ordering::Relaxed));
            assert!(pieces.iter().all(|piece| piece.load(Ordering::Relaxed) == 1), "{count}");
        }
    }

    #[test]
    fn jobs_of_one_process_share_its_cores() {
        assert_eq!(Threads::of_one_of(1_000_000).count(), 1);
        assert!((1..=MOST).contains(&Threads::of_one_of(0).count()));
    }
}
