//! Payloads where they were written: several hands write at the same time, each into memory of its own.

use crate::hands::{self, Hands};
use std::ops::Range;

/// Payloads in pieces. One after the other, these are what one hand would have written.
#[derive(Debug, Default)]
pub struct Written {
    /// Those from `used` on are memory for the next time.
    pieces: Vec<Vec<u8>>,
    used: usize,
}

impl Written {
    /// Forgets everything but its memory.
    pub fn clear(&mut self) {
        self.used = 0;
    }

    /// Bytes altogether.
    pub fn len(&self) -> usize {
        self.pieces().map(Vec::len).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn pieces(&self) -> impl Iterator<Item = &Vec<u8>> {
        self.pieces[..self.used].iter()
    }

    /// Some of the bytes. They MUST lie in one piece, as those of a payload do.
    pub fn get(&self, range: Range<usize>) -> &[u8] {
        let mut before = 0;
        for piece in self.pieces() {
            if range.end <= before + piece.len() && range.start >= before {
                return &piece[range.start - before..range.end - before];
            }
            before += piece.len();
        }
        assert!(range.is_empty(), "bytes of more than one payload");
        &[]
    }

    /// Everything in one.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut all = Vec::with_capacity(self.len());
        self.pieces().for_each(|piece| all.extend_from_slice(piece));
        all
    }

    /// Copies everything to memory that has room for it.
    pub fn copy_to(&self, mut to: &mut [u8], hands: &dyn Hands) {
        let cut = |piece| {
            let piece: &Vec<u8> = piece;
            let (here, after) = std::mem::take(&mut to).split_at_mut(piece.len());
            to = after;
            (piece, here)
        };
        let copies = self.pieces().map(cut).collect();
        let hands = if hands::busy(hands, self.len() / 4) > 1 { hands } else { &hands::Alone };
        hands::share_out(hands, copies, |(piece, to)| to.copy_from_slice(piece));
    }

    /// The piece to write at, if nobody else writes.
    pub(crate) fn last(&mut self) -> &mut Vec<u8> {
        if self.used == 0 {
            let first = self.spare();
            self.push(first);
        }
        &mut self.pieces[self.used - 1]
    }

    /// An empty piece, to be written and pushed.
    pub(super) fn spare(&mut self) -> Vec<u8> {
        let mut piece =
            if self.pieces.len() > self.used { self.pieces.swap_remove(self.used) } else { Vec::new() };
        piece.clear();
        piece
    }

    /// Appends a piece.
    pub(super) fn push(&mut self, piece: Vec<u8>) {
        self.pieces.insert(self.used, piece);
        self.used += 1;
    }

    /// Bytes of memory held.
    pub fn memory_bytes(&self) -> usize {
        self.pieces.iter().map(Vec::capacity).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hands::Alone;

    #[test]
    fn pieces_are_read_as_one() {
        let mut written = Written::default();
        for _ in 0..2 {
            written.clear();
            written.last().extend_from_slice(b"ab");
            for text in [&b"cde"[..], b"", b"f"] {
                let mut piece = written.spare();
                piece.extend_from_slice(text);
                written.push(piece);
            }
            assert_eq!((written.len(), written.to_vec()), (6, b"abcdef".to_vec()));
            assert_eq!(
                (written.get(0..2), written.get(3..5), written.get(5..6)),
                (&b"ab"[..], &b"de"[..], &b"f"[..])
            );
            let mut copy = [0; 6];
            written.copy_to(&mut copy, &Alone);
            assert_eq!(&copy, b"abcdef");
        }
        assert_eq!(written.pieces.len(), 4);
    }
}
