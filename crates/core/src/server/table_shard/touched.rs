//! Rows whose parameters were stepped since they were last broadcast.

use std::ops::Range;

/// A bit for each row of a table on a shard.
#[derive(Debug)]
pub(super) struct Touched {
    words: Vec<u64>,
}

impl Touched {
    pub(super) fn words(&self) -> &[u64] {
        &self.words
    }

    /// Those of so many rows; `None` if the words are of another number.
    pub(super) fn from_words(words: Vec<u64>, rows: usize) -> Option<Touched> {
        (words.len() == rows.div_ceil(64)).then_some(Touched { words })
    }

    pub(super) fn new(rows: usize) -> Touched {
        Touched { words: vec![0; rows.div_ceil(64)] }
    }

    #[inline]
    pub(super) fn mark(&mut self, row: usize) {
        self.words[row / 64] |= 1 << (row % 64);
    }

    /// Appends the touched rows of a range, ascending and counted from its start. They count as touched no more.
    pub(super) fn take(&mut self, range: Range<usize>, out: &mut Vec<u32>) {
        let mut row = range.start;
        while row < range.end {
            let (word, first) = (row / 64, row % 64);
            let end = (range.end - word * 64).min(64);
            let mask = (u64::MAX << first) & (u64::MAX >> (64 - end));
            let mut bits = self.words[word] & mask;
            self.words[word] &= !mask;
            while bits != 0 {
                let found = word * 64 + bits.trailing_zeros() as usize;
                out.push((found - range.start) as u32);
                bits &= bits - 1;
            }
            row = (word + 1) * 64;
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.words.len() * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_once_and_in_order() {
        let mut touched = Touched::new(200);
        let rows = [0, 1, 62, 63, 64, 65, 127, 128, 130, 199];
        rows.iter().for_each(|&row| touched.mark(row));
        touched.mark(64);
        let mut taken = |range: Range<usize>| {
            let mut found = Vec::new();
            touched.take(range, &mut found);
            found
        };
        assert_eq!(taken(63..129), [0, 1, 2, 64, 65]);
        assert_eq!(taken(60..131), [2, 70], "what was taken is gone, and nothing else is");
        assert_eq!(taken(0..200), [0, 1, 199]);
        assert_eq!((taken(0..200), taken(64..64)), (vec![], vec![]));
    }
}
