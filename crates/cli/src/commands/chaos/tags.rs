//! The workload `tags`: every element of a table counts the pushes of one worker.
//!
//! A worker writes down that it begins a push, and that the push was acknowledged, before it goes on. The file of a worker that was
//! killed therefore tells its acknowledged pushes, and the one that was under way.

use crate::training;
use anyhow::{Context, Result};
use paramill_core::status::MemberState;
use paramill_core::table::TableSpec;
use paramill_node::client::{Job, JobOptions, WorkerId};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// So many chunks of 4 KB: each of the few servers of such a job has some.
const ELEMENTS: usize = 12 * 1024;
/// A worker's pause between pushes: the processes of a job share few CPUs.
const PACE: Duration = Duration::from_millis(5);
/// Longer than the command waits for progress, which then tells who hangs.
const PATIENCE: Duration = Duration::from_secs(600);

const BEGUN: u8 = b'b';
const ACKNOWLEDGED: u8 = b'a';

/// The file of a worker's pushes.
pub(super) fn journal(folder: &Path, rank: u32) -> PathBuf {
    folder.join(format!("pushes-{rank}"))
}

/// The file that asks workers to end.
pub(super) fn stop(folder: &Path) -> PathBuf {
    folder.join("stop")
}

/// Pushes of one worker, of all its processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Pushes {
    pub(super) begun: u64,
    pub(super) acknowledged: u64,
}

impl Pushes {
    pub(super) fn read(folder: &Path, rank: u32) -> Pushes {
        // A worker that was killed before its first push has no file.
        Pushes::of(&std::fs::read(journal(folder, rank)).unwrap_or_default())
    }

    fn of(journal: &[u8]) -> Pushes {
        let count = |entry: u8| journal.iter().filter(|byte| **byte == entry).count() as u64;
        Pushes { begun: count(BEGUN), acknowledged: count(ACKNOWLEDGED) }
    }
}

/// How often the pushes of each worker are in the parameters.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Applied {
    /// The least and the most over the elements that count a worker, by rank.
    pub(super) workers: Vec<(f64, f64)>,
}

impl Applied {
    fn of(parameters: &[f32], workers: usize) -> Applied {
        let mut found = vec![(f64::INFINITY, f64::NEG_INFINITY); workers];
        for (index, value) in parameters.iter().enumerate() {
            let (least, most) = &mut found[index % workers];
            *least = least.min(f64::from(*value));
            *most = most.max(f64::from(*value));
        }
        Applied { workers: found }
    }

    /// Acknowledged pushes that are not in the parameters, and pushes that are there more often than they were begun.
    pub(super) fn judge(&self, pushes: &[Pushes]) -> Verdict {
        let mut verdict = Verdict::default();
        for ((least, most), pushes) in self.workers.iter().zip(pushes) {
            verdict.lost += (pushes.acknowledged as f64 - least).max(0.0).ceil() as u64;
            verdict.twice += (most - pushes.begun as f64).max(0.0).ceil() as u64;
        }
        verdict
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Verdict {
    pub(super) lost: u64,
    pub(super) twice: u64,
}

/// The worker process. The folder of the journals is its argument, who it is in the environment.
pub(crate) fn run_process(folder: &Path) -> Result<()> {
    training::end_with_parent()?;
    let job = Job::init(JobOptions::from_environment()?.timeout(PATIENCE))?;
    let rank = job.rank().context("a worker needs a rank")?;
    let workers = job.status()?.size.workers as usize;
    let mut journal = OpenOptions::new().create(true).append(true).open(journal(folder, rank.0))?;
    let table = job.table(TableSpec::dense("tags", [ELEMENTS as u64]), vec![0.0; ELEMENTS])?;
    job.start()?;
    // The optimizer subtracts it.
    let tag = |index: usize| if index % workers == rank.0 as usize { -1.0 } else { 0.0 };
    let gradient: Vec<f32> = (0..ELEMENTS).map(tag).collect();
    let stop = stop(folder);
    while !stop.exists() || !is_last_to_be(&job, rank)? {
        note(&mut journal, BEGUN)?;
        table.push(&gradient)?.wait()?;
        note(&mut journal, ACKNOWLEDGED)?;
        job.clock();
        table.pull()?.wait()?;
        std::thread::sleep(PACE);
    }
    if rank == WorkerId(0) {
        let applied = Applied::of(&table.pull_now()?.wait()?, workers);
        writeln!(std::io::stdout(), "{}", serde_json::to_string(&applied)?)?;
    }
    Ok(job.close()?)
}

/// Whether a worker may leave. Worker 0 reads the parameters when the others have left, and pushes on until then: they may wait for the
/// rounds that they have a part in.
fn is_last_to_be(job: &Job, rank: WorkerId) -> Result<bool> {
    Ok(rank != WorkerId(0)
        || job
            .status()?
            .workers
            .iter()
            .all(|worker| worker.worker == rank || worker.state == MemberState::Left))
}

/// In one write, which the system keeps when this process is killed.
fn note(journal: &mut File, entry: u8) -> Result<()> {
    journal.write_all(&[entry]).context("cannot write the journal of pushes")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(parameters: &[f32], journals: [&[u8]; 2]) -> Verdict {
        Applied::of(parameters, 2).judge(&journals.map(Pushes::of))
    }

    #[test]
    fn pushes_that_are_there_once_are_neither_lost_nor_twice() {
        assert_eq!(judge(&[2.0, 1.0, 2.0, 1.0], [b"baba", b"ba"]), Verdict::default());
    }

    #[test]
    fn a_push_under_way_may_be_there_in_whole_in_part_or_not() {
        for parameters in [[1.0, 0.0, 1.0, 0.0], [2.0, 0.0, 1.0, 0.0], [2.0, 0.0, 2.0, 0.0]] {
            assert_eq!(judge(&parameters, [b"bab", b""]), Verdict::default());
        }
    }

    #[test]
    fn a_push_that_is_missing_anywhere_is_lost() {
        assert_eq!(judge(&[2.0, 1.0, 1.0, 1.0], [b"baba", b"ba"]), Verdict { lost: 1, twice: 0 });
        // One under way does not make up for it.
        assert_eq!(judge(&[1.0, 0.0, 1.0, 0.0], [b"babba", b""]), Verdict { lost: 1, twice: 0 });
    }

    #[test]
    fn a_push_that_is_there_more_often_than_begun_is_twice() {
        assert_eq!(judge(&[3.0, 1.0, 3.0, 3.0], [b"babba", b"bab"]), Verdict { lost: 0, twice: 1 });
    }
}
