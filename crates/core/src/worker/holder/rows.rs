//! Updates of single rows that are held back, and the rows as they were last pulled.

use super::super::layout::RowPlace;
use crate::hold::{Hold, UpdateView};
use crate::kernels;
use crate::types::Clock;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The gradients of rows that were not sent, each row for itself, and copies of rows.
#[derive(Debug)]
pub(in super::super) struct HeldRows {
    width: usize,
    updates: BTreeMap<u32, RowUpdate>,
    /// The rows of `updates` by the push that their oldest gradient was meant for.
    by_age: BTreeSet<(u64, u32)>,
    /// What updates are compared with, and pulls are answered from.
    copies: BTreeMap<u32, RowCopy>,
}

#[derive(Debug)]
struct RowUpdate {
    sum: Vec<f32>,
    /// The push that its oldest gradient was meant for.
    since: u64,
    sum_of_squares: f64,
}

/// A row as it was pulled.
#[derive(Debug)]
struct RowCopy {
    values: Vec<f32>,
    /// The iteration that it was pulled for.
    pulled: Clock,
    /// An update of the row was sent since.
    is_outdated: bool,
}

/// What a checkpoint has of a row's update, beside the sum.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedRow {
    pub(super) row: u32,
    /// Pushes that its oldest gradient has been held back from.
    age: u64,
    sum_of_squares: f64,
}

/// Rows that are to be sent, ascending.
#[derive(Debug, Default)]
pub(in super::super) struct MergedRows {
    pub(in super::super) rows: Vec<u32>,
    /// Their updates, one after the other.
    pub(in super::super) values: Vec<f32>,
    /// The most pushes that one of them was held back for.
    pub(in super::super) longest: u64,
    /// Gradients that are held back.
    pub(in super::super) held: u64,
}

impl HeldRows {
    pub(super) fn new(width: usize) -> HeldRows {
        HeldRows { width, updates: BTreeMap::new(), by_age: BTreeSet::new(), copies: BTreeMap::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.updates.is_empty()
    }

    /// The push that the oldest gradient that is held back was meant for.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.by_age.first().map(|(since, _)| *since)
    }

    /// Whether every sum of these gradients with what is held back is finite.
    pub(in super::super) fn is_finite_with(&self, rows: &[u32], values: &[f32]) -> bool {
        rows.iter().zip(values.chunks_exact(self.width)).all(|(row, gradient)| {
            let held = self.updates.get(row);
            held.is_none_or(|held| kernels::squared_norm_of_sum(&held.sum, gradient).is_finite())
        })
    }

    /// Merges gradients of an iteration, and of the push with this number, with what is held back. Rows for which the policy does not hold, or that were held back for as
    /// long as they may be, are taken out; without a policy all of them.
    pub(in super::super) fn merge(
        &mut self,
        hold: Option<&Hold>,
        rows: &[u32],
        values: &[f32],
        (clock, push): (Clock, u64),
    ) -> MergedRows {
        for (&row, gradient) in rows.iter().zip(values.chunks_exact(self.width)) {
            let squares = kernels::squared_norm(gradient);
            match self.updates.get_mut(&row) {
                Some(update) => {
                    kernels::add(&mut update.sum, gradient);
                    update.sum_of_squares += squares;
                }
                None => {
                    let update = RowUpdate { sum: gradient.to_vec(), since: push, sum_of_squares: squares };
                    self.updates.insert(row, update);
                    self.by_age.insert((push, row));
                }
            }
        }
        let due: BTreeSet<u32> = match hold {
            None => self.updates.keys().copied().collect(),
            Some(hold) => {
                let is_due = |(since, _): &&(u64, u32)| push.saturating_sub(*since) >= hold.most();
                let old = self.by_age.iter().take_while(is_due).map(|(_, row)| *row);
                let is_sent = |row: &&u32| !hold.holds(&self.view(**row, clock, push));
                rows.iter().filter(is_sent).copied().chain(old).collect()
            }
        };
        let mut merged = MergedRows::default();
        for row in due {
            let Some(RowUpdate { sum, since, .. }) = self.updates.remove(&row) else { continue };
            self.by_age.remove(&(since, row));
            self.copies.get_mut(&row).into_iter().for_each(|copy| copy.is_outdated = true);
            merged.rows.push(row);
            merged.values.extend_from_slice(&sum);
            merged.longest = merged.longest.max(push.saturating_sub(since));
        }
        merged.held = rows.iter().filter(|row| self.updates.contains_key(row)).count() as u64;
        merged
    }

    /// Rows could not be sent: they are held back, as old as they were.
    pub(in super::super) fn put_back(&mut self, merged: MergedRows, push: u64) {
        let since = push.saturating_sub(merged.longest);
        for (row, sum) in merged.rows.into_iter().zip(merged.values.chunks_exact(self.width)) {
            let sum_of_squares = kernels::squared_norm(sum);
            self.updates.insert(row, RowUpdate { sum: sum.to_vec(), since, sum_of_squares });
            self.by_age.insert((since, row));
        }
    }

    /// Copies for a checkpoint, made before the push with this number: rows one after the other, and what else is known of each.
    pub(super) fn saved(&self, push: u64) -> (Vec<f32>, Vec<SavedRow>) {
        let values = self.updates.values().flat_map(|update| update.sum.iter().copied()).collect();
        let row = |(row, update): (&u32, &RowUpdate)| SavedRow {
            row: *row,
            age: push.saturating_sub(update.since),
            sum_of_squares: update.sum_of_squares,
        };
        (values, self.updates.iter().map(row).collect())
    }

    /// Holds back what was saved, beside what is held back already. The error says what does not fit.
    pub(super) fn keep_again(&mut self, values: &[f32], rows: &[SavedRow], push: u64) -> Result<(), String> {
        if values.len() != rows.len() * self.width {
            return Err(format!("{} rows that were held back have {} elements", rows.len(), values.len()));
        }
        for (SavedRow { row, age, sum_of_squares }, sum) in rows.iter().zip(values.chunks_exact(self.width)) {
            let since = push.saturating_sub(*age);
            let update = RowUpdate { sum: sum.to_vec(), since, sum_of_squares: *sum_of_squares };
            let update = match self.updates.remove(row) {
                None => update,
                Some(mut known) => {
                    self.by_age.remove(&(known.since, *row));
                    kernels::add(&mut known.sum, sum);
                    known.since = known.since.min(since);
                    known.sum_of_squares += sum_of_squares;
                    known
                }
            };
            self.by_age.insert((update.since, *row));
            self.updates.insert(*row, update);
        }
        Ok(())
    }

    fn view(&self, row: u32, clock: Clock, push: u64) -> UpdateView {
        let update = &self.updates[&row];
        let parameters = self.copies.get(&row).map_or(0.0, |copy| kernels::squared_norm(&copy.values));
        UpdateView {
            squared_norm: kernels::squared_norm(&update.sum),
            squared_parameters: parameters,
            sum_of_squares: update.sum_of_squares,
            held: push.saturating_sub(update.since),
            clock,
        }
    }

    /// Puts rows of which a copy will do in an iteration to their places in `to`; the others are left. A copy will do as long as no update
    /// of its row was sent since it was pulled, and for `most` iterations.
    pub(in super::super) fn answer(
        &self,
        most: u64,
        clock: Clock,
        wanted: &mut Vec<RowPlace>,
        to: &mut [f32],
    ) {
        wanted.retain(|RowPlace { row, place }| {
            let will_do = |copy: &&RowCopy| !copy.is_outdated && clock.saturating_sub(copy.pulled) <= most;
            let Some(copy) = self.copies.get(row).filter(will_do) else { return true };
            let start = *place as usize * self.width;
            to[start..start + self.width].copy_from_slice(&copy.values);
            false
        });
    }

    /// Rows that were pulled for an iteration are here.
    pub(in super::super) fn note_pulled(&mut self, clock: Clock, rows: &[RowPlace], values: &[f32]) {
        for RowPlace { row, place } in rows {
            let start = *place as usize * self.width;
            let Some(values) = values.get(start..start + self.width) else { return };
            let copy = RowCopy { values: values.to_vec(), pulled: clock, is_outdated: false };
            self.copies.insert(*row, copy);
        }
    }

    /// Copies are of no use without a policy.
    pub(in super::super) fn forget_copies(&mut self) {
        self.copies.clear();
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let values = self.width * size_of::<f32>();
        self.updates.len() * (values + size_of::<(u32, RowUpdate)>() + size_of::<(u64, u32)>())
            + self.copies.len() * (values + size_of::<(u32, RowCopy)>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hold;

    fn hold(text: &str) -> Hold {
        Hold::parse(&hold::axis(), text).unwrap().unwrap()
    }

    fn places(rows: &[u32]) -> Vec<RowPlace> {
        (0..).zip(rows).map(|(place, &row)| RowPlace { row, place }).collect()
    }

    #[test]
    fn rows_are_sent_when_they_are_significant_or_old() {
        let (hold, mut held) = (hold("significance:0.5,most=3"), HeldRows::new(1));
        held.note_pulled(0, &places(&[1, 2, 7]), &[10.0, 10.0, 10.0]);
        // A row that was never pulled is compared with nothing, and sent.
        let merged = held.merge(Some(&hold), &[1, 2, 5], &[2.0, 6.0, 1.0], (0, 0));
        assert_eq!((merged.rows, merged.values, merged.held), (vec![2, 5], vec![6.0, 1.0], 1));
        let merged = held.merge(Some(&hold), &[7], &[1.0], (1, 1));
        assert_eq!((merged.rows.len(), held.oldest()), (0, Some(0)));
        let merged = held.merge(Some(&hold), &[1], &[4.0], (2, 2));
        assert_eq!((merged.rows, merged.values, merged.longest), (vec![1], vec![6.0], 2));
        // Row 7 is due although it has no gradient.
        let merged = held.merge(Some(&hold), &[2], &[1.0], (4, 4));
        assert_eq!((merged.rows, merged.longest, merged.held), (vec![7], 3, 1));
        assert!(!held.is_empty());
        let merged = held.merge(None, &[], &[], (5, 5));
        assert_eq!((merged.rows, held.is_empty(), held.oldest()), (vec![2], true, None));
    }

    #[test]
    fn a_pull_is_answered_from_copies_that_are_neither_outdated_nor_old() {
        let (hold, mut held) = (hold("significance:0.5,most=3"), HeldRows::new(2));
        held.note_pulled(5, &places(&[1, 2]), &[1.0, 2.0, 3.0, 4.0]);
        let ask = |held: &HeldRows, clock| {
            let (mut wanted, mut to) = (places(&[1, 2, 3]), [0.0; 6]);
            held.answer(3, clock, &mut wanted, &mut to);
            (wanted.iter().map(|wanted| wanted.row).collect::<Vec<u32>>(), to)
        };
        assert_eq!(ask(&held, 5), (vec![3], [1.0, 2.0, 3.0, 4.0, 0.0, 0.0]));
        held.merge(Some(&hold), &[1, 2], &[0.1, 0.1, 5.0, 5.0], (6, 6));
        assert_eq!(ask(&held, 7), (vec![2, 3], [1.0, 2.0, 0.0, 0.0, 0.0, 0.0]), "row 2 was sent");
        assert_eq!((ask(&held, 8).0, ask(&held, 9).0), (vec![2, 3], vec![1, 2, 3]));
        held.forget_copies();
        assert_eq!(ask(&held, 5).0, [1, 2, 3]);
    }

    #[test]
    fn rows_that_could_not_be_sent_are_held_back_as_before() {
        let mut held = HeldRows::new(1);
        held.merge(Some(&hold("when:true,most=9")), &[3, 4], &[1.0, 2.0], (2, 2));
        let merged = held.merge(None, &[4], &[1.0], (5, 5));
        held.put_back(merged, 5);
        assert_eq!((held.oldest(), held.is_finite_with(&[4], &[f32::MAX])), (Some(2), true));
        let merged = held.merge(None, &[], &[], (6, 6));
        assert_eq!((merged.rows, merged.values), (vec![3, 4], vec![1.0, 3.0]));
        held.merge(Some(&hold("when:true")), &[3], &[f32::MAX], (7, 7));
        assert!(!held.is_finite_with(&[3], &[f32::MAX]));
    }
}
