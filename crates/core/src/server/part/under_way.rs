//! The pushes that are under way, found by their worker.

use crate::consistency::Admit;
use crate::server::rounds::Staged;
use crate::types::{Clock, WorkerId};

/// A push that is under way.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) worker: WorkerId,
    pub(super) clock: Clock,
    /// Where its gradients go; decided anew when the round they went to closes in the middle of the push.
    pub(super) admit: Admit,
    /// Frames before this one were taken; a resent push starts again at 0 and is skipped up to here.
    pub(super) next_part: u32,
    /// The chunk of the last frame that was taken: a push names its chunks in ascending order, each once.
    pub(super) last_chunk: Option<u32>,
    /// A frame of this attempt was refused; the rest of the attempt is ignored.
    pub(super) refused: bool,
    pub(super) squared_norm: f64,
    /// Kept whole until the push is complete: for ranked addition, or when the optimizer needs its norm.
    pub(super) staged: Staged,
}

impl Incoming {
    pub(super) fn new(worker: WorkerId, clock: Clock, admit: Admit) -> Incoming {
        Incoming {
            worker,
            clock,
            admit,
            next_part: 0,
            last_chunk: None,
            refused: false,
            squared_norm: 0.0,
            staged: Staged::default(),
        }
    }
}

/// At most one push per worker. Neither finding nor adding one depends on how many there are, or takes memory once
/// there were as many before.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    /// By rank: one more than the push's place in `pushes`, or 0.
    places: Vec<u32>,
    pushes: Vec<Incoming>,
}

impl UnderWay {
    fn place(&self, worker: WorkerId) -> Option<usize> {
        let place = self.places.get(worker.0 as usize).copied().unwrap_or(0);
        (place as usize).checked_sub(1)
    }

    pub(super) fn get(&self, worker: WorkerId) -> Option<&Incoming> {
        Some(&self.pushes[self.place(worker)?])
    }

    pub(super) fn get_mut(&mut self, worker: WorkerId) -> Option<&mut Incoming> {
        let place = self.place(worker)?;
        Some(&mut self.pushes[place])
    }

    /// Begins a push, and gives up one of the same worker.
    pub(super) fn begin(&mut self, push: Incoming) -> &mut Incoming {
        let rank = push.worker.0 as usize;
        let place = match self.place(push.worker) {
            Some(place) => {
                self.pushes[place] = push;
                place
            }
            None => {
                if self.places.len() <= rank {
                    self.places.resize(rank + 1, 0);
                }
                self.pushes.push(push);
                self.places[rank] = self.pushes.len() as u32;
                self.pushes.len() - 1
            }
        };
        &mut self.pushes[place]
    }

    pub(super) fn remove(&mut self, worker: WorkerId) -> Option<Incoming> {
        let place = self.place(worker)?;
        self.places[worker.0 as usize] = 0;
        let push = self.pushes.swap_remove(place);
        if let Some(moved) = self.pushes.get(place) {
            self.places[moved.worker.0 as usize] = place as u32 + 1;
        }
        Some(push)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Incoming> {
        self.pushes.iter_mut()
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.pushes.is_empty()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.pushes.iter().map(|push| push.staged.memory_bytes()).sum()
    }
}
