//! What a worker of a job that goes on from a checkpoint takes over of the workers that were saved: it reads their files from the
//! coordinator before its start is complete.

use crate::checkpoint::{Request, Resumed, SavedFile, WorkerFile};
use crate::limits;
use crate::types::WorkerId;
use crate::wire::{FilePart, PartPlace};
use std::collections::VecDeque;

/// The files that are left to be taken over, and the one that comes.
#[derive(Debug)]
pub(super) struct Restoring {
    folder: String,
    files: VecDeque<Wanted>,
    /// What came of the first file.
    bytes: Vec<u8>,
    /// All of it came, and the driver reads it.
    is_unpacking: bool,
}

/// A file, and what is taken over of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) file: SavedFile,
    /// Residuals and updates that were held back.
    pub(super) takes_arrays: bool,
    /// It is of the same rank: momentum and factors, which are no part of a sum, are taken over too.
    pub(super) is_own: bool,
    pub(super) takes_notes: bool,
}

/// What follows from a part of a file.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// Ask for the next part.
    Ask(PartPlace),
    /// The file is here: have it read.
    Unpack(Request),
    /// It is not the part that was asked for.
    Ignore,
}

impl Restoring {
    /// Of a worker with this rank among so many; `None` if it takes nothing over. What the ranks that the job does not have any more
    /// kept goes to those that are left, one after the other: a sum of gradients that servers lack does not depend on who sends
    /// it. Ranks that are new begin with notes of those that were, which say how far these had come.
    pub(super) fn new(resumed: &Resumed, rank: WorkerId, workers: u32) -> Option<Restoring> {
        let (workers, before) = (workers.max(1), resumed.workers.max(1));
        let files = resumed.worker_files.iter().filter_map(|WorkerFile { worker, file }| {
            let is_own = *worker == rank;
            let takes_arrays = is_own || worker.0 >= workers && worker.0 % workers == rank.0;
            let takes_notes = worker.0 == rank.0 % before;
            let file = file.clone();
            (takes_arrays || takes_notes).then_some(Wanted { file, takes_arrays, is_own, takes_notes })
        });
        let files: VecDeque<Wanted> = files.collect();
        let folder = resumed.folder.clone();
        (!files.is_empty()).then(|| Restoring { folder, files, bytes: Vec::new(), is_unpacking: false })
    }

    pub(super) fn folder(&self) -> &str {
        &self.folder
    }

    /// The part that is to be read next; none while the file is being unpacked.
    pub(super) fn place(&self) -> Option<PartPlace> {
        let Wanted { file, .. } = self.files.front().filter(|_| !self.is_unpacking)?;
        let start = self.bytes.len() as u64;
        Some(PartPlace { reader: 0, folder: self.folder.clone(), file: file.name.clone(), start })
    }

    /// A part has come. The error is a sentence.
    pub(super) fn take(&mut self, part: FilePart) -> Result<Step, String> {
        let Some(asked) = self.place().filter(|asked| *asked == PartPlace { reader: 0, ..part.place }) else {
            return Ok(Step::Ignore);
        };
        if let Some(why) = part.refusal {
            return Err(why);
        }
        let file = self.files.front().map(|wanted| wanted.file.clone()).unwrap_or_default();
        let left = file.bytes - asked.start;
        let is_expected = part.bytes.len() as u64 == left.min(limits::MAX_PART_BYTES as u64);
        let has_room = self.bytes.try_reserve_exact(part.bytes.len()).is_ok();
        if !is_expected || !has_room {
            return Err(format!("{} bytes of {} came where {left} are left", part.bytes.len(), file.name));
        }
        self.bytes.extend_from_slice(&part.bytes);
        self.is_unpacking = self.bytes.len() as u64 == file.bytes;
        Ok(match self.place() {
            Some(next) => Step::Ask(next),
            None => Step::Unpack(Request::Unpack { file, bytes: std::mem::take(&mut self.bytes) }),
        })
    }

    /// The first file is unpacked; what is taken over of it.
    pub(super) fn unpacked(&mut self) -> Option<Wanted> {
        self.is_unpacking = false;
        self.files.pop_front()
    }

    /// Whether everything is here.
    pub(super) fn is_over(&self) -> bool {
        self.files.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(rank: u32, bytes: u64) -> WorkerFile {
        let file =
            SavedFile { name: format!("worker-{rank}.safetensors"), bytes, digest: Default::default() };
        WorkerFile { worker: WorkerId(rank), file }
    }

    fn resumed(files: Vec<WorkerFile>) -> Resumed {
        Resumed { folder: "step".into(), clock: 5, files: vec![], workers: 3, worker_files: files }
    }

    /// The ranks whose arrays, and whose notes, a worker takes over.
    fn taken_over(rank: u32, workers: u32) -> (Vec<u32>, Vec<u32>) {
        let resumed = resumed((0..3).map(|rank| saved(rank, 1)).collect());
        let restoring = Restoring::new(&resumed, WorkerId(rank), workers);
        let wanted = restoring.map(|restoring| restoring.files).unwrap_or_default();
        let rank_of = |wanted: &&Wanted| {
            let name = &wanted.file.name;
            resumed.worker_files.iter().find(|known| known.file.name == *name).expect("known").worker.0
        };
        let arrays = wanted.iter().filter(|wanted| wanted.takes_arrays);
        let notes = wanted.iter().filter(|wanted| wanted.takes_notes);
        (arrays.map(|wanted| rank_of(&wanted)).collect(), notes.map(|wanted| rank_of(&wanted)).collect())
    }

    #[test]
    fn every_residual_has_one_heir_and_every_worker_the_notes_of_one() {
        for workers in 1..7 {
            let mut heirs: Vec<u32> = (0..workers).flat_map(|rank| taken_over(rank, workers).0).collect();
            heirs.sort_unstable();
            assert_eq!(heirs, [0, 1, 2], "{workers} workers");
            assert!((0..workers).all(|rank| taken_over(rank, workers).1 == [rank % 3]));
        }
        assert_eq!(taken_over(0, 2), (vec![0, 2], vec![0]));
        assert_eq!(taken_over(4, 5), (vec![], vec![1]));
    }

    #[test]
    fn files_come_in_parts_and_what_does_not_fit_is_told() {
        let part_bytes = limits::MAX_PART_BYTES as u64;
        let mut restoring =
            Restoring::new(&resumed(vec![saved(0, part_bytes + 3)]), WorkerId(0), 3).expect("something");
        let first = restoring.place().expect("it begins");
        let part = |place: &PartPlace, bytes: usize| FilePart {
            place: place.clone(),
            bytes: vec![7; bytes],
            refusal: None,
        };
        let Ok(Step::Ask(second)) = restoring.take(part(&first, limits::MAX_PART_BYTES)) else {
            panic!("more")
        };
        assert_eq!(second.start, part_bytes);
        // It was asked for twice.
        assert_eq!(restoring.take(part(&first, limits::MAX_PART_BYTES)), Ok(Step::Ignore));
        assert!(restoring.take(part(&second, 4)).unwrap_err().contains("4 bytes of worker-0.safetensors"));
        let refused = FilePart { refusal: Some("it is gone".into()), ..part(&second, 0) };
        assert_eq!(restoring.take(refused), Err("it is gone".into()));
        let Ok(Step::Unpack(Request::Unpack { bytes, .. })) = restoring.take(part(&second, 3)) else {
            panic!("it is whole")
        };
        assert_eq!((bytes.len() as u64, restoring.is_over()), (part_bytes + 3, false));
        assert_eq!(restoring.place(), None, "nothing is asked for twice after a broken connection");
        assert!(restoring.unpacked().is_some_and(|wanted| wanted.takes_arrays && wanted.takes_notes));
        assert!(restoring.is_over() && restoring.place().is_none());
    }
}
