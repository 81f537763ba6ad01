//! What a worker keeps of a table that servers do not have, as checkpoints save it.

use super::encoding::PushCodec;
use super::holder::TableHold;
use super::layout::{Layout, RowPlace};
use crate::checkpoint::{ArrayKind, WorkerArray};
use crate::types::Clock;

/// The codec of a table's pushes, and its updates that are held back.
#[derive(Debug)]
pub(super) struct Keeping<'a> {
    layout: &'a Layout,
    /// Gone while a submission has it.
    codec: Option<&'a mut PushCodec>,
    held: &'a mut TableHold,
}

impl<'a> Keeping<'a> {
    pub(super) fn new(
        layout: &'a Layout,
        codec: Option<&'a mut PushCodec>,
        held: &'a mut TableHold,
    ) -> Keeping<'a> {
        Keeping { layout, codec, held }
    }

    /// Whether something is kept, or may be.
    pub(super) fn is_some(&self) -> bool {
        // A codec that is with a submission is seen when that is made.
        self.held.may_hold() || self.codec.as_ref().is_none_or(|codec| codec.keeps_back())
    }

    /// Rows that were pulled for an iteration are here: updates of them are compared with these.
    pub(super) fn note_rows(self, clock: Clock, rows: &[RowPlace], values: &[f32]) {
        self.held.note_rows(clock, rows, values);
    }

    /// Copies of what is kept, for a checkpoint that is made in an iteration, while nothing is submitted.
    pub(super) fn copies(self, clock: Clock) -> Result<Vec<WorkerArray>, String> {
        let Keeping { layout, codec, held } = self;
        let mut arrays = codec.map_or(Ok(Vec::new()), |codec| codec.kept_back(layout, clock))?;
        arrays.extend(held.kept_back(layout)?);
        Ok(arrays)
    }

    /// Keeps what a worker kept when it was saved, this one or another. The error says what does not fit.
    pub(super) fn keep_again(self, array: WorkerArray, is_own: bool) -> Result<(), String> {
        let Keeping { layout, codec, held } = self;
        match (array.kind, codec) {
            (ArrayKind::Held, _) => held.keep_again(layout, &array),
            (_, Some(codec)) => codec.keep_again(layout, array, is_own),
            (_, None) => Ok(()),
        }
    }
}
