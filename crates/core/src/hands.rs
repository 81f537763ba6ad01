//! Several hands for one large piece of work. This crate has no threads: whoever drives it lends some.

#![allow(
    clippy::disallowed_types,
    reason = "these locks hand work over to threads that a driver lends; no role has one"
)]

use crate::limits::BLOCK_ELEMENTS;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Pieces for each hand, because not all get on equally fast.
const PIECES_EACH: usize = 4;

/// Those who work on something large together. Two methods are required.
pub trait Hands {
    /// How many work at the same time.
    fn count(&self) -> usize;

    /// MUST call `work` once with each number below `pieces`, on whichever threads, and return when all calls have.
    fn share(&self, pieces: usize, work: &(dyn Fn(usize) + Sync));

    /// The fewest elements that are worth a hand of their own: sharing fewer costs more than it saves.
    fn worth(&self) -> usize {
        1 << 19
    }
}

/// The caller does everything itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Hands for Alone {
    fn count(&self) -> usize {
        1
    }

    fn share(&self, pieces: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..pieces).for_each(work);
    }
}

/// How many hands have something to do with so many elements.
pub(crate) fn busy(hands: &dyn Hands, elements: usize) -> usize {
    (elements / hands.worth().max(1)).min(hands.count()).max(1)
}

/// How many pieces so many elements are cut into; one when they are not worth sharing.
pub(crate) fn pieces(hands: &dyn Hands, elements: usize) -> usize {
    match busy(hands, elements) {
        1 => 1,
        busy => PIECES_EACH * busy,
    }
}

/// Cuts a range of elements into pieces of whole blocks.
pub(crate) fn cut(hands: &dyn Hands, elements: Range<usize>) -> Vec<Range<usize>> {
    let each = elements.len().div_ceil(pieces(hands, elements.len())).next_multiple_of(BLOCK_ELEMENTS);
    elements.clone().step_by(each.max(1)).map(|start| start..elements.end.min(start + each)).collect()
}

/// Works on every item, and gives the results in the order of the items, whoever made them.
pub(crate) fn share_out<T: Send, R: Send>(
    hands: &dyn Hands,
    items: Vec<T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    if items.len() < 2 || hands.count() < 2 {
        return items.into_iter().map(work).collect();
    }
    let places: Vec<Mutex<(Option<T>, Option<R>)>> =
        items.into_iter().map(|item| Mutex::new((Some(item), None))).collect();
    hands.share(places.len(), &|number| {
        // Nobody else has this number: the lock is never waited for.
        let mut place = places[number].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(item) = place.0.take() {
            place.1 = Some(work(item));
        }
    });
    let result = |place: Mutex<(Option<T>, Option<R>)>| {
        let (_, result) = place.into_inner().unwrap_or_else(PoisonError::into_inner);
        result.expect("every piece was worked on")
    };
    places.into_iter().map(result).collect()
}

/// Memory of hands that do not work at the moment, for the next ones.
#[derive(Debug)]
pub(crate) struct Shelf<T>(Mutex<Vec<T>>);

impl<T> Default for Shelf<T> {
    fn default() -> Shelf<T> {
        Shelf(Mutex::new(Vec::new()))
    }
}

impl<T> Shelf<T> {
    /// What was put there last.
    pub(crate) fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    pub(crate) fn put(&self, item: T) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(item);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Three hands of tests. Works on the last piece first.
    pub(crate) struct Backwards;

    impl Hands for Backwards {
        fn count(&self) -> usize {
            3
        }

        fn share(&self, pieces: usize, work: &(dyn Fn(usize) + Sync)) {
            (0..pieces).rev().for_each(work);
        }
    }

    #[test]
    fn results_come_in_the_order_of_the_items() {
        let squares = share_out(&Backwards, (0..10).collect(), |number: usize| number * number);
        assert_eq!(squares, (0..10).map(|number| number * number).collect::<Vec<_>>());
    }

    #[test]
    fn a_range_is_cut_into_all_of_itself() {
        for len in [0, 1, 5000, (1 << 20) - 1, 1 << 20, (1 << 22) + 77] {
            for hands in [&Alone as &dyn Hands, &Backwards] {
                let cut = cut(hands, 100..100 + len);
                assert_eq!(cut.iter().map(|piece| piece.len()).sum::<usize>(), len);
                assert!(cut.windows(2).all(|pair| pair[0].end == pair[1].start && !pair[0].is_empty()));
                assert_eq!(cut.len() > 1, hands.count() > 1 && len >= 1 << 20);
            }
        }
    }
}
