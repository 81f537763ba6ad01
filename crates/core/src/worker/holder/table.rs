//! The update of a dense table that is held back.

use super::super::missing::Missing;
use crate::hold::UpdateView;
use crate::kernels;
use crate::lease::Pool;
use crate::store::{Allocate, Buffer};
use crate::types::Clock;
use serde::{Deserialize, Serialize};

/// The sum of a dense table's gradients that were not sent.
#[derive(Debug, Default)]
pub(in super::super) struct HeldTable {
    /// `None` while nothing is held back.
    update: Option<Update>,
}

#[derive(Debug)]
struct Update {
    sum: Buffer,
    /// The push that its oldest gradient was meant for.
    since: u64,
    /// The sum of their squared norms.
    sum_of_squares: f64,
    /// Elements that none of them has.
    missing: Missing,
}

/// What a checkpoint has of an update, beside the sum.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedUpdate {
    /// Pushes that its oldest gradient has been held back from.
    age: u64,
    sum_of_squares: f64,
    missing: Vec<(u64, u64)>,
}

/// An update that is to be sent.
#[derive(Debug)]
pub(in super::super) struct MergedTable {
    pub(in super::super) sum: Buffer,
    pub(in super::super) missing: Missing,
    /// The push that its oldest gradient was meant for.
    pub(in super::super) since: u64,
}

impl HeldTable {
    /// The push that the oldest gradient that is held back was meant for.
    pub(in super::super) fn since(&self) -> Option<u64> {
        self.update.as_ref().map(|update| update.since)
    }

    /// The update together with a gradient, whose squared norm is known, of an iteration and the push with this number. The squared norm
    /// of parameters is left to the caller.
    pub(in super::super) fn view(
        &self,
        gradient: &[f32],
        squares: f64,
        clock: Clock,
        push: u64,
    ) -> UpdateView {
        let (squared_norm, before, since) = match &self.update {
            None => (squares, 0.0, push),
            Some(update) => (
                kernels::squared_norm_of_sum(update.sum.as_slice(), gradient),
                update.sum_of_squares,
                update.since,
            ),
        };
        UpdateView {
            squared_norm,
            squared_parameters: 0.0,
            sum_of_squares: before + squares,
            held: push.saturating_sub(since),
            clock,
        }
    }

    /// Holds a gradient back. `view` is of the update with it.
    pub(in super::super) fn keep(
        &mut self,
        (gradient, missing): (&[f32], &Missing),
        view: &UpdateView,
        push: u64,
        (pool, memory): (&Pool, &dyn Allocate),
    ) {
        match &mut self.update {
            Some(update) => {
                kernels::add(update.sum.as_mut_slice(), gradient);
                update.sum_of_squares = view.sum_of_squares;
                update.missing = update.missing.intersection(missing);
            }
            None => {
                let mut sum = pool.take(gradient.len(), memory);
                sum.as_mut_slice()[..gradient.len()].copy_from_slice(gradient);
                let (missing, sum_of_squares) = (missing.clone(), view.sum_of_squares);
                self.update = Some(Update { sum, since: push, sum_of_squares, missing });
            }
        }
    }

    /// What is held back, together with a gradient if there is one: nothing is held back any more.
    pub(in super::super) fn take(&mut self, gradient: Option<(&[f32], &Missing)>) -> Option<MergedTable> {
        let Update { mut sum, since, mut missing, .. } = self.update.take()?;
        if let Some((gradient, lacks)) = gradient {
            kernels::add(sum.as_mut_slice(), gradient);
            missing = missing.intersection(lacks);
        }
        Some(MergedTable { sum, missing, since })
    }

    /// An update could not be sent: it is held back as before.
    pub(in super::super) fn put_back(&mut self, merged: MergedTable) {
        let MergedTable { sum, missing, since } = merged;
        let sum_of_squares = kernels::squared_norm(sum.as_slice());
        self.update = Some(Update { sum, since, sum_of_squares, missing });
    }

    /// A copy for a checkpoint, made before the push with this number: the sum of so many elements, and what else is known of it.
    pub(super) fn saved(&self, elements: usize, push: u64) -> Option<(&[f32], SavedUpdate)> {
        let Update { sum, since, sum_of_squares, missing } = self.update.as_ref()?;
        let missing = missing.ranges().iter().map(|range| (range.start as u64, range.end as u64)).collect();
        let saved =
            SavedUpdate { age: push.saturating_sub(*since), sum_of_squares: *sum_of_squares, missing };
        Some((&sum.as_slice()[..elements], saved))
    }

    /// Holds back what was saved, beside what is held back already. The error says what does not fit.
    pub(super) fn keep_again(&mut self, values: &[f32], saved: SavedUpdate, push: u64) -> Result<(), String> {
        let ranges = saved.missing.iter().map(|(start, end)| *start as usize..*end as usize).collect();
        let lacks = Missing::new(ranges, values.len())?;
        let (since, squares) = (push.saturating_sub(saved.age), saved.sum_of_squares);
        self.update = Some(match self.update.take() {
            None => Update { sum: Buffer::copy_of(values), since, sum_of_squares: squares, missing: lacks },
            Some(Update { mut sum, since: before, sum_of_squares, missing }) => {
                kernels::add(&mut sum.as_mut_slice()[..values.len()], values);
                Update {
                    sum,
                    since: before.min(since),
                    sum_of_squares: sum_of_squares + squares,
                    missing: missing.intersection(&lacks),
                }
            }
        });
        Ok(())
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.update.as_ref().map_or(0, |update| update.sum.memory_bytes())
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]
mod tests {
    use super::*;
    use crate::store::Heap;

    fn lacks(range: std::ops::Range<usize>) -> Missing {
        Missing::new(vec![range], 4).unwrap()
    }

    #[test]
    fn an_update_is_the_sum_of_its_gradients_and_as_old_as_the_first() {
        let (pool, mut held) = (Pool::new(1), HeldTable::default());
        let (one, other) = ([3.0, 4.0, 0.0, 0.0], [1.0, 0.0, 0.0, 2.0]);
        let view = held.view(&one, 25.0, 90, 6);
        assert_eq!(view.held, 0);
        held.keep((&one, &lacks(2..4)), &view, 6, (&pool, &Heap));
        let view = held.view(&other, 5.0, 91, 9);
        assert_eq!((view.squared_norm, view.sum_of_squares, view.held), (36.0, 30.0, 3));
        held.keep((&other, &lacks(1..3)), &view, 9, (&pool, &Heap));
        assert_eq!((held.since(), held.memory_bytes() > 0), (Some(6), true));
        let merged = held.take(Some((&one, &lacks(2..3)))).unwrap();
        assert_eq!(merged.sum.as_slice(), [7.0, 8.0, 0.0, 2.0]);
        assert_eq!(merged.missing.ranges(), [2..3], "all of its gradients lack it");
        assert_eq!((merged.since, held.since(), held.memory_bytes()), (6, None, 0));
        held.put_back(merged);
        assert_eq!(
            (held.since(), held.take(None).is_some(), held.take(None).is_none()),
            (Some(6), true, true)
        );
    }
}
