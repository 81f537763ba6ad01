//! The pushes that are under way, found by their worker.

use crate::types::{Clock, WorkerId};
use serde::{Deserialize, Serialize};

/// A push of which some frames were taken, and not the last.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Push<D, K> {
    worker: WorkerId,
    clock: Clock,
    /// The worker's number for it. Every attempt has another.
    request: u64,
    /// Frames before this one were taken; a push that is sent again starts at 0 and is skipped up to here.
    next_sequence: u32,
    /// The chunk of the last frame that was taken: a sparse push names its chunks in ascending order, each once.
    last_chunk: Option<u32>,
    /// A frame of this attempt was refused; the rest of the attempt is ignored.
    is_refused: bool,
    /// Destination of its gradients.
    destination: D,
    /// The sink's state of this push.
    pub(crate) kept: K,
}

impl<D: Copy, K: Default> Push<D, K> {
    #[inline]
    pub(super) fn new(worker: WorkerId, clock: Clock, request: u64, destination: D) -> Push<D, K> {
        Push {
            worker,
            clock,
            request,
            next_sequence: 0,
            last_chunk: None,
            is_refused: false,
            destination,
            kept: K::default(),
        }
    }

    pub(crate) fn worker(&self) -> WorkerId {
        self.worker
    }

    pub(crate) fn clock(&self) -> Clock {
        self.clock
    }

    /// The worker's number for its latest attempt.
    pub(crate) fn request(&self) -> u64 {
        self.request
    }

    /// How many frames were taken.
    pub(crate) fn frames(&self) -> u32 {
        self.next_sequence
    }

    /// The chunk of the last frame that was taken.
    pub(crate) fn last_chunk(&self) -> Option<u32> {
        self.last_chunk
    }

    pub(crate) fn destination(&self) -> D {
        self.destination
    }

    pub(crate) fn set_destination(&mut self, destination: D) {
        self.destination = destination;
    }

    /// A frame of an attempt arrived: the number of the frame that is wanted. None is wanted of an attempt that was
    /// refused; the first frame begins another attempt.
    #[inline]
    pub(super) fn wanted(&mut self, sequence: u32, request: u64) -> u32 {
        self.request = request;
        self.is_refused &= sequence > 0;
        if self.is_refused { u32::MAX } else { self.next_sequence }
    }

    /// A frame of it was taken.
    #[inline]
    pub(super) fn took(&mut self, chunk: u32) {
        self.next_sequence += 1;
        self.last_chunk = Some(chunk);
    }
}

/// At most one push per worker. Neither finding nor adding one depends on how many there are, or takes memory once
/// there were as many before.
#[derive(Debug)]
pub(super) struct UnderWay<D, K> {
    /// By rank: one more than the push's place in `pushes`, or 0.
    places: Vec<u32>,
    pushes: Vec<Push<D, K>>,
}

impl<D, K> Default for UnderWay<D, K> {
    fn default() -> UnderWay<D, K> {
        UnderWay { places: Vec::new(), pushes: Vec::new() }
    }
}

impl<D, K> UnderWay<D, K> {
    #[inline]
    fn place(&self, worker: WorkerId) -> Option<usize> {
        let place = self.places.get(worker.0 as usize).copied().unwrap_or(0);
        (place as usize).checked_sub(1)
    }

    #[inline]
    pub(super) fn get(&self, worker: WorkerId) -> Option<&Push<D, K>> {
        Some(&self.pushes[self.place(worker)?])
    }

    /// The push of this clock, if it is the one that the worker is at.
    #[inline]
    pub(super) fn at(&mut self, worker: WorkerId, clock: Clock) -> Option<&mut Push<D, K>> {
        let place = self.place(worker)?;
        Some(&mut self.pushes[place]).filter(|push| push.clock == clock)
    }

    /// Begins a push, and gives up one of the same worker.
    pub(super) fn begin(&mut self, push: Push<D, K>) {
        let rank = push.worker.0 as usize;
        if let Some(place) = self.place(push.worker) {
            self.pushes[place] = push;
            return;
        }
        if self.places.len() <= rank {
            self.places.resize(rank + 1, 0);
        }
        self.pushes.push(push);
        self.places[rank] = self.pushes.len() as u32;
    }

    #[inline]
    pub(super) fn remove(&mut self, worker: WorkerId) -> Option<Push<D, K>> {
        let place = self.place(worker)?;
        self.places[worker.0 as usize] = 0;
        let push = self.pushes.swap_remove(place);
        if let Some(moved) = self.pushes.get(place) {
            self.places[moved.worker.0 as usize] = place as u32 + 1;
        }
        Some(push)
    }

    /// Refuses an attempt once: true for its first frame that cannot be taken. The others of the same attempt are ignored.
    pub(super) fn refuse(&mut self, worker: WorkerId, clock: Clock, sequence: u32) -> bool {
        let is_known = match self.at(worker, clock) {
            Some(push) => std::mem::replace(&mut push.is_refused, true),
            // No frame of it was taken: its first frame was refused.
            None => true,
        };
        !is_known || sequence == 0
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Push<D, K>> {
        self.pushes.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Push<D, K>> {
        self.pushes.iter_mut()
    }

    /// Whether every push is where its worker is looked up.
    pub(super) fn check(&self) -> Result<(), String> {
        let known = self.places.iter().filter(|&&place| place > 0).count();
        if known != self.pushes.len() {
            return Err(format!(
                "{known} workers have pushes under way, and there are {}",
                self.pushes.len()
            ));
        }
        match (0..).zip(&self.pushes).find(|(at, push)| self.place(push.worker) != Some(*at)) {
            Some((at, push)) => Err(format!("the push of {} is not at {at}", push.worker)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(under_way: &mut UnderWay<(), ()>, worker: u32, clock: Clock) {
        under_way.begin(Push::new(WorkerId(worker), clock, 0, ()));
    }

    #[test]
    fn a_push_is_found_by_its_worker_whichever_others_end() {
        let mut under_way = UnderWay::default();
        (0..4).for_each(|worker| begin(&mut under_way, worker, u64::from(worker) + 10));
        begin(&mut under_way, 2, 20);
        assert_eq!(under_way.remove(WorkerId(1)).map(|push| push.clock()), Some(11));
        assert!(under_way.remove(WorkerId(1)).is_none() && under_way.get(WorkerId(9)).is_none());
        let clocks = [0, 1, 2, 3].map(|worker| under_way.get(WorkerId(worker)).map(Push::clock));
        assert_eq!((clocks, under_way.check()), ([Some(10), None, Some(20), Some(13)], Ok(())));
        assert!(under_way.at(WorkerId(3), 13).is_some() && under_way.at(WorkerId(3), 12).is_none());
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let mut under_way = UnderWay::default();
        begin(&mut under_way, 0, 0);
        begin(&mut under_way, 1, 0);
        under_way.pushes.swap(0, 1);
        assert!(under_way.check().is_err(), "each is where the other is looked up");
        under_way.pushes.pop();
        assert!(under_way.check().is_err(), "one is not there");
    }
}
