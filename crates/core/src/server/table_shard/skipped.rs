//! Steps that were made without some elements, for lack of a gradient.

use crate::absence::Absent;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// For each element of a dense chunk, how many of the chunk's steps were made without it, because it had no gradient. Adam's
/// bias correction depends on the number of a step, and counts only the steps that included the element.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::server) struct SkippedSteps {
    /// Only chunks with an element that missed a step.
    chunks: BTreeMap<usize, Vec<Run>>,
}

/// Neighbouring elements of a chunk that missed equally many steps. A run begins where the run before it ends.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Run {
    end: u32,
    skipped: u32,
}

impl SkippedSteps {
    /// Whether runs cover chunks of these lengths, by chunk; the error says which do not.
    pub(super) fn check(&self, elements: impl Fn(usize) -> Option<usize>) -> Result<(), String> {
        for (chunk, runs) in &self.chunks {
            let ascend = std::iter::once(0).chain(runs.iter().map(|run| run.end)).is_sorted_by(|a, b| a < b);
            let last = runs.last().map(|run| run.end as usize);
            if !ascend || last.is_none() || elements(*chunk) != last {
                return Err(format!("steps that elements of chunk {chunk} missed are not of its length"));
            }
        }
        Ok(())
    }

    /// Whether elements of this chunk missed steps.
    pub(super) fn has(&self, chunk: usize) -> bool {
        self.chunks.contains_key(&chunk)
    }

    /// A run of a chunk's elements that missed equally many steps, by its place among them; and how many that is.
    pub(in crate::server) fn run(&self, chunk: usize, number: usize) -> Option<(Range<usize>, u64)> {
        let runs = self.chunks.get(&chunk)?;
        let run = runs.get(number)?;
        let start = number.checked_sub(1).map_or(0, |before| runs[before].end);
        Some((start as usize..run.end as usize, u64::from(run.skipped)))
    }

    /// Sets the runs of a chunk: where each ends, and how many steps it missed. [`SkippedSteps::check`] is to follow.
    pub(in crate::server) fn set(&mut self, chunk: usize, runs: impl IntoIterator<Item = (usize, u64)>) {
        let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let run = |(end, skipped)| Run { end: narrow(end as u64), skipped: narrow(skipped) };
        let runs: Vec<Run> = runs.into_iter().map(run).collect();
        if runs.iter().any(|run| run.skipped > 0) {
            self.chunks.insert(chunk, runs);
        }
    }

    /// Counts a step of a chunk as missed for its absent elements. Returns the ranges that are present, each with the number
    /// of steps that it missed before.
    pub(super) fn present(
        &mut self,
        chunk: usize,
        elements: usize,
        absent: &Absent,
    ) -> Vec<(Range<usize>, u64)> {
        let before = self.chunks.remove(&chunk);
        let before = before.unwrap_or_else(|| vec![Run { end: elements as u32, skipped: 0 }]);
        let (mut present, mut after) = (Vec::new(), Vec::with_capacity(before.len()));
        let (mut start, mut left) = (0, absent.ranges().iter().peekable());
        for run in before {
            while start < run.end {
                while left.peek().is_some_and(|range| range.end <= start) {
                    left.next();
                }
                let (is_absent, end) = match left.peek() {
                    Some(range) if range.start <= start => (true, range.end.min(run.end)),
                    Some(range) => (false, range.start.min(run.end)),
                    None => (false, run.end),
                };
                if !is_absent {
                    present.push((start as usize..end as usize, u64::from(run.skipped)));
                }
                append(&mut after, Run { end, skipped: run.skipped.saturating_add(u32::from(is_absent)) });
                start = end;
            }
        }
        if after.iter().any(|run| run.skipped > 0) {
            self.chunks.insert(chunk, after);
        }
        present
    }

    /// All runs of elements that missed steps: the chunk, the elements in it, and how many.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, Range<usize>, u32)> {
        self.chunks.iter().flat_map(|(&chunk, runs)| {
            let starts = [0].into_iter().chain(runs.iter().map(|run| run.end));
            let runs = starts.zip(runs).filter(|(_, run)| run.skipped > 0);
            runs.map(move |(start, run)| (chunk, start as usize..run.end as usize, run.skipped))
        })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.chunks.values().map(|runs| runs.capacity() * size_of::<Run>()).sum()
    }
}

/// Adds a run to the end. If it missed as many steps as the last run, it extends that one.
fn append(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.skipped == run.skipped => last.end = run.end,
        _ => runs.push(run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ELEMENTS: usize = 20;

    proptest! {
        /// Against a plain count for each element.
        #[test]
        fn every_element_counts_the_steps_that_it_missed(
            steps in proptest::collection::vec(proptest::collection::vec(any::<bool>(), ELEMENTS), 1..12)
        ) {
            let mut skipped = SkippedSteps::default();
            let mut counts = [0; ELEMENTS];
            for absent_now in steps {
                let is_absent = |at: &usize| absent_now[*at];
                let ranges: Vec<Range<usize>> = (0..ELEMENTS).filter(is_absent).map(|at| at..at + 1).collect();
                let absent = Absent::in_chunk(&ranges, 0..ELEMENTS);
                let present = skipped.present(7, ELEMENTS, &absent);
                let stepped: Vec<(usize, u64)> =
                    present.into_iter().flat_map(|(range, missed)| range.map(move |at| (at, missed))).collect();
                let expected: Vec<(usize, u64)> =
                    (0..ELEMENTS).filter(|at| !absent_now[*at]).map(|at| (at, counts[at])).collect();
                prop_assert_eq!(stepped, expected);
                for at in 0..ELEMENTS {
                    counts[at] += u64::from(absent_now[at]);
                }
            }
            prop_assert_eq!(skipped.has(7), counts != [0; ELEMENTS]);
            let runs = (0..).map_while(|number| skipped.run(7, number));
            let by_run: Vec<u64> = runs.flat_map(|(range, missed)| range.map(move |_| missed)).collect();
            prop_assert!(by_run == counts || counts == [0; ELEMENTS] && by_run.is_empty());
        }
    }

    #[test]
    fn runs_take_memory_once_there_are_some() {
        let mut skipped = SkippedSteps::default();
        assert_eq!(skipped.memory_bytes(), 0);
        let ranges = [1..2, 5..6].map(|range: Range<usize>| range);
        skipped.present(0, ELEMENTS, &Absent::in_chunk(&ranges, 0..ELEMENTS));
        assert_eq!((0..).map_while(|number| skipped.run(0, number)).count(), 5);
        assert!((5 * 8..=8 * 8).contains(&skipped.memory_bytes()), "{}", skipped.memory_bytes());
    }
}
