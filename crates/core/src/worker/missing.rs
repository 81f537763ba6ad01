//! Ranges of a table that have no gradient.

use super::layout::elements_of;
use crate::absence::Absent;
use crate::lease::Lease;
use crate::limits;
use crate::role::Body;
use crate::table::Chunk;
use std::ops::Range;
use std::sync::Arc;

/// Ranges of a dense table that a gradient does not have: ascending, disjoint, not empty. Usually there are none.
#[derive(Debug, Clone, Default)]
pub(super) struct Missing(Option<Arc<[Range<usize>]>>);

/// A gradient that has everything.
pub(super) static NOTHING: Missing = Missing(None);

impl Missing {
    /// The error says what is wrong with the ranges for a table of so many elements.
    pub(super) fn new(ranges: Vec<Range<usize>>, elements: usize) -> Result<Missing, String> {
        if ranges.len() > limits::MAX_ABSENT_RANGES {
            let most = limits::MAX_ABSENT_RANGES;
            return Err(format!("a gradient lacks {} ranges; at most {most} can be named", ranges.len()));
        }
        let is_ascending = ranges.windows(2).all(|pair| pair[0].end <= pair[1].start);
        let is_some = ranges.iter().all(|range| range.start < range.end);
        if !is_ascending || !is_some || ranges.last().is_some_and(|last| last.end > elements) {
            return Err(format!(
                "the ranges that a gradient lacks are ascending, disjoint, not empty, and within its {elements} elements"
            ));
        }
        Ok(Missing((!ranges.is_empty()).then(|| ranges.into())))
    }

    pub(super) fn ranges(&self) -> &[Range<usize>] {
        self.0.as_deref().unwrap_or(&[])
    }

    /// Everything is missing of a gradient of so many elements.
    pub(super) fn all(elements: usize) -> Missing {
        Missing(Some(std::iter::once(0..elements).collect()))
    }

    /// What both lack. Beyond [`limits::MAX_ABSENT_RANGES`] ranges it counts as zeros, which every receiver can take.
    pub(super) fn intersection(&self, other: &Missing) -> Missing {
        let (mut both, mut rest) = (Vec::new(), other.ranges());
        for range in self.ranges() {
            rest = &rest[rest.partition_point(|other| other.end <= range.start)..];
            let within = rest.iter().take_while(|other| other.start < range.end);
            both.extend(within.map(|other| other.start.max(range.start)..other.end.min(range.end)));
        }
        both.truncate(limits::MAX_ABSENT_RANGES);
        Missing((!both.is_empty()).then(|| both.into()))
    }

    /// What a chunk's frame carries, and whether it begins with a list of what is missing. Where something is, the bytes are
    /// copied behind that list.
    pub(super) fn body(&self, chunk: &Chunk, buffer: &Lease, bytes: Range<usize>) -> (Body, bool) {
        let place = elements_of(chunk);
        let len = place.len();
        let absent = match &self.0 {
            None => Absent::default(),
            Some(ranges) => Absent::in_chunk(ranges, place),
        };
        if absent.is_empty() {
            return (Body::Shared { buffer: buffer.clone(), start: bytes.start, len: bytes.len() }, false);
        }
        (Body::Bytes(absent.payload(len, &buffer.as_bytes()[bytes])), true)
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]
mod tests {
    use super::*;

    #[test]
    fn two_gradients_lack_what_both_lack() {
        let missing = |ranges: &[Range<usize>]| Missing::new(ranges.to_vec(), 20).unwrap();
        let (one, other) = (missing(&[0..4, 6..9, 12..20]), missing(&[2..7, 8..14, 15..16, 18..20]));
        let both = [2..4, 6..7, 8..9, 12..14, 15..16, 18..20];
        assert_eq!(
            (one.intersection(&other).ranges(), other.intersection(&one).ranges()),
            (&both[..], &both[..])
        );
        assert_eq!(one.intersection(&Missing::all(20)).ranges(), one.ranges());
        assert!(
            one.intersection(&NOTHING).ranges().is_empty() && NOTHING.intersection(&one).ranges().is_empty()
        );
    }

    #[test]
    fn ranges_that_cannot_be_missing_are_refused() {
        for fine in [vec![], vec![0..1], vec![0..3, 3..4, 6..8]] {
            assert_eq!(Missing::new(fine.clone(), 8).unwrap().ranges(), fine);
        }
        for (what, ranges) in [
            ("descending", vec![3..4, 0..1]),
            ("overlapping", vec![0..3, 2..4]),
            ("empty", vec![2..2]),
            ("beyond the end", vec![6..9]),
        ] {
            assert!(Missing::new(ranges, 8).is_err(), "{what}");
        }
        let many = |count: usize| (0..count).map(|at| 2 * at..2 * at + 1).collect::<Vec<_>>();
        let most = limits::MAX_ABSENT_RANGES;
        assert!(Missing::new(many(most), 1 << 20).is_ok());
        let why = Missing::new(many(most + 1), 1 << 20).unwrap_err();
        assert!(why.contains("at most 65536 can be named"), "{why}");
    }
}
