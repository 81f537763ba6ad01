//! Rows of a chunk in an update: their numbers in the chunk, ascending, then their values, or what a codec made of these.

use crate::codec::Decoder;
use crate::store;

/// Rows that an update brings. The numbers are those of rows in the chunk.
pub(super) struct RowsUpdate<'a> {
    numbers: &'a [[u8; 4]],
    values: &'a [u8],
    width: usize,
}

impl<'a> RowsUpdate<'a> {
    /// Reads the payload of so many rows of a chunk of `elements`; `None` when they are not rows of it.
    pub(super) fn read(
        payload: &'a [u8],
        count: u32,
        width: usize,
        elements: usize,
    ) -> Option<RowsUpdate<'a>> {
        let rows = elements.checked_div(width)?;
        if count == 0 || count as usize > rows {
            return None;
        }
        let (numbers, values) = payload.split_at_checked(4 * count as usize)?;
        let numbers = numbers.as_chunks::<4>().0;
        let number = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes) as usize;
        let is_ascending = numbers.windows(2).all(|pair| number(&pair[0]) < number(&pair[1]));
        let is_in_range = numbers.last().is_some_and(|last| number(last) < rows);
        (is_ascending && is_in_range).then_some(RowsUpdate { numbers, values, width })
    }

    /// Copies the values of the rows to their places in the chunk. Whether they fit; nothing is copied otherwise.
    pub(super) fn copy(&self, chunk: &mut [f32]) -> bool {
        let values = store::floats(self.values);
        let fitting = values.filter(|values| values.len() == self.numbers.len() * self.width);
        fitting.map(|values| self.spread(values, chunk)).is_some()
    }

    /// The same with what a codec made, which is decoded here first.
    pub(super) fn decode(&self, decoder: &mut Decoder, values: &mut Vec<f32>, chunk: &mut [f32]) -> bool {
        // No more than the chunk has.
        values.resize(self.numbers.len() * self.width, 0.0);
        decoder.decode(self.values, values).map(|()| self.spread(values, chunk)).is_ok()
    }

    fn spread(&self, values: &[f32], chunk: &mut [f32]) {
        for (number, row) in self.numbers.iter().zip(values.chunks_exact(self.width)) {
            let start = u32::from_le_bytes(*number) as usize * self.width;
            chunk[start..start + self.width].copy_from_slice(row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Digest, Replica, Taken};
    use crate::codec::{Codec, Context, Encoder};
    use crate::policy::{Axis, Policy};
    use crate::registry::Registry;
    use crate::types::{Clock, TableId};
    use crate::wire::frame::{Form, Piece, Update};
    use proptest::prelude::*;
    use std::sync::Arc;

    const CHUNKS: u32 = 3;
    const WIDTH: usize = 2;
    const ROWS: usize = 4;
    const ELEMENTS: usize = ROWS * WIDTH;

    fn update(chunk: u32, version: Clock, form: Form) -> Update {
        let piece = Piece { chunk, sequence: chunk, is_last: false };
        Update { epoch: 1, table: TableId(0), round: version, version, piece, form, digest: 0, delay: None }
    }

    /// The end of a version, after which everything has this digest.
    fn end(version: Clock, digest: u64) -> Update {
        let piece = Piece { chunk: 0, sequence: CHUNKS, is_last: true };
        Update { piece, digest, ..update(0, version, Form::Rows { count: 0 }) }
    }

    fn rows(numbers: &[u32], value: f32) -> (Form, Vec<u8>) {
        let values = vec![value; numbers.len() * WIDTH];
        let payload = [bytemuck::cast_slice(numbers), bytemuck::cast_slice(&values)].concat();
        (Form::Rows { count: numbers.len() as u32 }, payload)
    }

    fn codec(text: &str) -> Arc<Codec> {
        let policy = Policy::default().with(Axis::AnswerCodec, text);
        Arc::new(policy.codecs(&Registry::builtin()).unwrap().answer.of_rows())
    }

    /// One with version 0 of all chunks: ones.
    fn replica(text: &str) -> Replica {
        let codec = (text != "none").then(|| codec(text));
        let chunks = (0..CHUNKS as usize).map(|index| (index * ELEMENTS..(index + 1) * ELEMENTS, 0));
        let mut replica = Replica::new(CHUNKS as usize * ELEMENTS, codec, chunks).of_rows(WIDTH);
        for chunk in 0..CHUNKS {
            let mut plain = update(chunk, 0, Form::PLAIN);
            plain.piece.is_last = chunk + 1 == CHUNKS;
            let ones: Vec<u8> = bytemuck::cast_slice(&[1.0f32; ELEMENTS]).to_vec();
            assert_eq!(replica.take(0, &plain, &ones), Taken::Applied);
        }
        assert_eq!(replica.version(0), Some(0));
        replica
    }

    fn take(replica: &mut Replica, chunk: u32, version: Clock, (form, payload): (Form, Vec<u8>)) -> Taken {
        replica.take(0, &update(chunk, version, form), &payload)
    }

    fn places(of: &[u32]) -> Vec<u8> {
        bytemuck::cast_slice(of).to_vec()
    }

    fn digest(replica: &Replica) -> u64 {
        let mut digest = Digest::new();
        (0..CHUNKS as usize).for_each(|place| digest.take(Digest::of_chunk(replica.chunk(0, place).2)));
        digest.finish()
    }

    #[test]
    fn a_version_is_whole_when_its_end_and_all_that_it_lists_are_here() {
        let mut replica = replica("none");
        assert_eq!(take(&mut replica, 1, 1, rows(&[0, 3], 5.0)), Taken::Applied);
        assert_eq!(replica.take(0, &end(1, 0), &places(&[1, 2])), Taken::Missing, "chunk 2 is missing");
        assert_eq!(replica.version(0), Some(0));
        assert_eq!(take(&mut replica, 2, 1, rows(&[1], 6.0)), Taken::Applied);
        assert_eq!(take(&mut replica, 2, 1, rows(&[1], 7.0)), Taken::Known);
        assert_eq!(replica.take(0, &end(1, digest(&replica)), &places(&[1, 2])), Taken::Applied);
        assert_eq!(replica.take(0, &end(1, 0), &places(&[1, 2])), Taken::Known);
        // Chunk 0 did not change, and is of version 1 too.
        assert_eq!((replica.version(0), replica.chunk(0, 0).1), (Some(1), Some(1)));
        assert_eq!(replica.chunk(0, 1).2, [5.0, 5.0, 1.0, 1.0, 1.0, 1.0, 5.0, 5.0]);
        assert_eq!(replica.row(9, WIDTH), [6.0, 6.0]);
        // A version in which nothing changed.
        assert_eq!(replica.take(0, &end(2, digest(&replica)), &[]), Taken::Applied);
        assert_eq!(replica.take(0, &end(4, 0), &[]), Taken::Missing, "version 3 is missing");
        assert_eq!(take(&mut replica, 0, 4, rows(&[1], 6.0)), Taken::Missing);
        assert_eq!(take(&mut replica, 0, 3, rows(&[1], 6.0)), Taken::Applied);
        assert_eq!(replica.take(0, &end(3, 77), &places(&[0])), Taken::Differs);
        assert_eq!(replica.version(0), Some(2));
    }

    #[test]
    fn a_whole_chunk_is_taken_whatever_was_missed_and_nothing_is_one_of_zeros() {
        let mut replica = replica("none");
        let newer = Update { version: 7, ..update(1, 5, Form::PLAIN) };
        assert_eq!(replica.take(0, &newer, &[]), Taken::Applied);
        assert_eq!(replica.chunk(0, 1), (1, Some(7), &[0.0; ELEMENTS][..]));
        // Versions that it is ahead of leave it as it is, and are whole with it.
        for version in 1..=7 {
            assert_eq!(take(&mut replica, 1, version, rows(&[2], 5.0)), Taken::Known);
            assert_eq!(replica.take(0, &end(version, 0), &places(&[1])), Taken::Applied);
        }
        assert_eq!(take(&mut replica, 1, 8, rows(&[2], 5.0)), Taken::Applied);
        assert_eq!(replica.chunk(0, 1).2[4..6], [5.0; 2]);
    }

    #[test]
    fn what_a_codec_made_of_rows_is_read_by_it() {
        let mut payload = Vec::new();
        let context = Context { layer_elements: ELEMENTS as u64, ..Context::default() };
        let difference = [0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 3.0];
        let mut encoder = Encoder::without_memory(codec("dvf:delta=1e-3"));
        encoder.encode(0, &difference, &context, &mut payload).unwrap();
        let mut differences = replica("dvf:delta=1e-3");
        let form = Form::EncodedRows { count: 0 };
        assert_eq!(
            take(&mut differences, 0, 2, (form, payload.clone())),
            Taken::Missing,
            "version 1 is missing"
        );
        assert_eq!(take(&mut differences, 0, 1, (form, payload)), Taken::Applied);
        assert_eq!(differences.chunk(0, 0).2, [1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 4.0]);
        let mut payload = places(&[1, 3]);
        Encoder::without_memory(codec("f16"))
            .encode(0, &[0.5, 2.0, 3.0, 0.0], &context, &mut payload)
            .unwrap();
        let mut values = replica("f16");
        let form = Form::EncodedRows { count: 2 };
        assert_eq!(take(&mut values, 0, 2, (form, payload.clone())), Taken::Missing, "version 1 is missing");
        assert_eq!(take(&mut values, 0, 1, (form, payload.clone())), Taken::Applied);
        assert_eq!(values.chunk(0, 0).2, [1.0, 1.0, 0.5, 2.0, 1.0, 1.0, 3.0, 0.0]);
        payload.pop();
        assert_eq!(take(&mut values, 1, 1, (form, payload)), Taken::Missing);
    }

    #[test]
    fn what_are_no_rows_of_the_chunk_is_not_taken() {
        let mut replica = replica("none");
        let before: Vec<f32> =
            (0..CHUNKS as usize).flat_map(|place| replica.chunk(0, place).2.to_vec()).collect();
        let (form, good) = rows(&[0, 1], 5.0);
        let many = rows(&[0, 1, 2, 3, 4], 5.0);
        for (form, payload) in [
            (form, good[..good.len() - 4].to_vec()),
            (form, [&good[..], &[0; 4]].concat()),
            (form, good[..6].to_vec()),
            (Form::Rows { count: u32::MAX }, good.clone()),
            (Form::Rows { count: 0 }, good.clone()),
            (Form::EncodedRows { count: 2 }, good.clone()),
            (Form::Encoded, good.clone()),
            rows(&[1, 1], 5.0),
            rows(&[3, 2], 5.0),
            rows(&[4], 5.0),
            many,
        ] {
            assert_eq!(take(&mut replica, 1, 1, (form, payload)), Taken::Missing, "{form:?}");
        }
        for list in [&places(&[3])[..], &places(&[u32::MAX]), &[0, 0, 0], &places(&[0])] {
            assert_eq!(replica.take(0, &end(1, 0), list), Taken::Missing);
        }
        let after: Vec<f32> =
            (0..CHUNKS as usize).flat_map(|place| replica.chunk(0, place).2.to_vec()).collect();
        assert_eq!((replica.version(0), before), (Some(0), after));
        // Nor is there an end of a version of a dense table.
        let chunks = (0..2).map(|index| (index * ELEMENTS..(index + 1) * ELEMENTS, 0));
        let mut dense = Replica::new(2 * ELEMENTS, None, chunks);
        assert_eq!(dense.take(0, &end(0, 0), &[]), Taken::Missing);
        assert_eq!(dense.take(0, &update(0, 0, Form::PLAIN), &[]), Taken::Missing);
    }

    proptest! {
        /// Whatever comes, nothing panics, and no version is whole that was not ended.
        #[test]
        fn any_bytes_are_survived(
            payload in prop::collection::vec(any::<u8>(), 0..200),
            (chunk, count, version) in (0..4u32, 0..6u32, 0..3u64),
            (is_rows, is_encoded, is_last) in any::<(bool, bool, bool)>(),
            codec in prop::sample::select(vec!["none", "f16", "topk:0.5"]),
        ) {
            let mut replica = replica(codec);
            let form = match (is_rows, is_encoded) {
                (true, true) => Form::EncodedRows { count },
                (true, false) => Form::Rows { count },
                (false, true) => Form::Encoded,
                (false, false) => Form::PLAIN,
            };
            let mut update = update(chunk, version, form);
            update.piece.is_last = is_last;
            replica.take(0, &update, &payload);
            prop_assert!(replica.version(0) <= Some(1));
        }
    }
}
