//! Pieces of a table that were read from a checkpoint, found by the elements of the table.

use crate::checkpoint::TableCut;
use std::ops::Range;

/// The pieces of one table. They come from files, whatever these say.
#[derive(Debug)]
pub(super) struct Restored<'a> {
    /// By the first element in the table.
    ranges: Vec<PieceRange<'a>>,
    /// Elements that were left out of steps: where they begin and end, and of how many. Ascending.
    skipped: Vec<(Range<u64>, u64)>,
    name: &'a str,
}

#[derive(Debug)]
struct PieceRange<'a> {
    elements: Range<u64>,
    steps: u64,
    piece: &'a TableCut,
    /// The first element in the piece's arrays.
    offset: usize,
}

/// Neighbouring elements of one piece with the same number of steps.
#[derive(Debug)]
pub(super) struct Stretch<'a> {
    pub(super) piece: &'a TableCut,
    /// First element in the table.
    pub(super) start: u64,
    pub(super) len: usize,
    /// First element in the piece's arrays.
    pub(super) offset: usize,
    /// Optimizer steps that the elements took part in.
    pub(super) steps: u64,
}

impl<'a> Restored<'a> {
    /// The error says which piece does not fit itself, or the optimizer with so many slots.
    pub(super) fn new(name: &'a str, pieces: &'a [TableCut], slots: usize) -> Result<Restored<'a>, String> {
        let (mut ranges, mut skipped) = (Vec::new(), Vec::new());
        for piece in pieces {
            let mut offset = 0;
            for range in &piece.ranges {
                let len = usize::try_from(range.len).unwrap_or(usize::MAX);
                ranges.push(PieceRange { elements: range.elements(), steps: range.steps, piece, offset });
                offset = len.saturating_add(offset);
            }
            let fits =
                piece.parameters.len() == offset && piece.slots.iter().all(|slot| slot.len() == offset);
            if !fits {
                return Err(format!("a piece of table `{name}` has other lengths than it says"));
            }
            if piece.slots.len() != slots {
                return Err(format!(
                    "the optimizer state of table `{name}` has {} values for each parameter, and the job's optimizer keeps \
                     {slots}; use the optimizer that the checkpoint was made with",
                    piece.slots.len()
                ));
            }
            let runs = piece.skipped.iter();
            let of = |run: &crate::checkpoint::SkippedRun| {
                (run.start..run.start.saturating_add(run.len), u64::from(run.skipped))
            };
            skipped.extend(runs.map(of));
        }
        ranges.sort_by_key(|range| range.elements.start);
        skipped.sort_by_key(|(elements, _)| elements.start);
        Ok(Restored { ranges, skipped, name })
    }

    /// Everything about these elements, stretch by stretch without a gap. An error ends it: they are not all there.
    pub(super) fn stretches(
        &self,
        elements: Range<u64>,
    ) -> impl Iterator<Item = Result<Stretch<'a>, String>> {
        let (mut next, mut is_over) = (elements.start, false);
        std::iter::from_fn(move || {
            if next >= elements.end || is_over {
                return None;
            }
            let stretch = self.stretch(next, elements.end);
            match &stretch {
                Ok(stretch) => next += stretch.len as u64,
                Err(_) => is_over = true,
            }
            Some(stretch)
        })
    }

    fn stretch(&self, start: u64, end: u64) -> Result<Stretch<'a>, String> {
        let before = self.ranges.partition_point(|range| range.elements.start <= start);
        let found = before.checked_sub(1).map(|at| &self.ranges[at]);
        let Some(range) = found.filter(|range| range.elements.contains(&start)) else {
            return Err(format!("element {start} of table `{}` is in none of its files", self.name));
        };
        let after = self.skipped.partition_point(|(elements, _)| elements.end <= start);
        let (skipped, until) = match self.skipped.get(after) {
            Some((elements, skipped)) if elements.start <= start => (*skipped, elements.end),
            Some((elements, _)) => (0, elements.start),
            None => (0, u64::MAX),
        };
        let len = range.elements.end.min(end).min(until) - start;
        Ok(Stretch {
            piece: range.piece,
            start,
            len: len as usize,
            offset: range.offset + (start - range.elements.start) as usize,
            steps: range.steps.saturating_sub(skipped),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{CutRange, SkippedRun};

    fn piece(start: u64, len: u64, steps: u64, skipped: &[(u64, u64, u32)]) -> TableCut {
        let run = |&(start, len, skipped): &(u64, u64, u32)| SkippedRun { start, len, skipped };
        TableCut {
            name: "w".into(),
            shape: vec![10],
            version: steps,
            ranges: vec![CutRange { start, len, steps }],
            skipped: skipped.iter().map(run).collect(),
            parameters: (start..start + len).map(|at| at as f32).collect(),
            slots: vec![vec![0.0; len as usize]],
        }
    }

    #[test]
    fn elements_are_found_with_the_steps_that_they_took_part_in() {
        let pieces = [piece(4, 6, 9, &[(5, 2, 3)]), piece(0, 4, 7, &[])];
        let restored = Restored::new("w", &pieces, 1).unwrap();
        let found: Vec<(u64, usize, u64)> = restored
            .stretches(2..9)
            .map(|stretch| {
                let stretch = stretch.unwrap();
                assert_eq!(stretch.piece.parameters[stretch.offset], stretch.start as f32);
                (stretch.start, stretch.len, stretch.steps)
            })
            .collect();
        assert_eq!(found, [(2, 2, 7), (4, 1, 9), (5, 2, 6), (7, 2, 9)]);
    }

    #[test]
    fn what_is_missing_or_does_not_fit_is_told() {
        let pieces = [piece(0, 4, 7, &[]), piece(5, 5, 7, &[])];
        let restored = Restored::new("w", &pieces, 1).unwrap();
        let why = restored.stretches(2..9).find_map(Result::err).unwrap();
        assert_eq!(why, "element 4 of table `w` is in none of its files");
        let why = Restored::new("w", &pieces, 2).unwrap_err();
        assert!(why.contains("has 1 values for each parameter, and the job's optimizer keeps 2"), "{why}");
        let short = [TableCut { parameters: vec![], ..piece(0, 4, 7, &[]) }];
        assert!(Restored::new("w", &short, 1).unwrap_err().contains("other lengths"));
        let endless = [TableCut {
            ranges: vec![
                CutRange { start: 1, len: u64::MAX, steps: 1 },
                CutRange { start: 0, len: u64::MAX, steps: 1 },
            ],
            ..piece(0, 4, 7, &[])
        }];
        assert!(Restored::new("w", &endless, 1).is_err());
    }
}
