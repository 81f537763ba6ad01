//! Steps that some elements were left out of.

use crate::absence::Absent;
use std::collections::BTreeMap;
use std::ops::Range;

/// How many of a dense chunk's steps its elements were left out of, for lack of a gradient. What depends on the number of
/// a step, as Adam's correction of its bias does, counts only the steps that an element took part in.
#[derive(Debug, Default)]
pub(super) struct SkippedSteps {
    /// Only chunks of which some element was left out once.
    chunks: BTreeMap<usize, Vec<Run>>,
}

/// Elements of a chunk that were left out equally often: from where the run before it ends.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Run {
    end: u32,
    skipped: u32,
}

impl SkippedSteps {
    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// The elements of a chunk that a step is made with, and how many steps they have missed. Those that are absent miss
    /// this one too.
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

    pub(super) fn memory_bytes(&self) -> usize {
        self.chunks.values().map(|runs| runs.capacity() * size_of::<Run>()).sum()
    }
}

/// Adds a run to the end; one that was left out as often as the last one is part of that.
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
            prop_assert_eq!(skipped.is_empty(), counts == [0; ELEMENTS]);
        }
    }
}
