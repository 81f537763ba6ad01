//! The receiving end of the codec of a table's answers.

use super::layout::Layout;
use crate::codec::{Codec, Decoder};
use crate::kernels::{self, Values};
use crate::limits;
use crate::table::TableSpec;
use crate::wire::DType;
use std::ops::Range;
use std::sync::Arc;

/// Reads answers.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// The type of the elements that they come as, where a codec does not encode them.
    elements: Option<DType>,
    decoder: Option<Decoder>,
    /// Sum of all answers so far, where answers are differences; whether or not the application saw it.
    base: Option<Vec<f32>>,
}

impl Answers {
    /// For answers of a table that this codec makes.
    pub(super) fn new(spec: &TableSpec, codec: Codec) -> Answers {
        let has_base = codec.is_for_differences() && !spec.rows;
        Answers {
            elements: codec.element_type().filter(|&dtype| !spec.rows || dtype == DType::F32),
            base: has_base.then(|| vec![0.0; spec.elements() as usize]),
            decoder: (!codec.is_none()).then(|| Decoder::new(Arc::new(codec))),
        }
    }

    /// The type of the elements that they come as, where a codec does not encode them.
    pub(super) fn elements(&self) -> Option<DType> {
        self.elements
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.base.as_ref().map_or(0, |base| base.capacity() * 4)
    }

    /// Whether answers are differences, which have to be added up in the base first.
    pub(super) fn has_base(&self) -> bool {
        self.base.is_some()
    }

    /// Sum of all answers so far, where answers are differences.
    pub(super) fn base(&self) -> Option<&[f32]> {
        self.base.as_deref()
    }

    /// A chunk came whole: the next difference is one to this.
    pub(super) fn set_base(&mut self, place: Range<usize>, values: Values<'_>) {
        if let Some(base) = &mut self.base {
            kernels::copy(&mut base[place], values);
        }
    }

    /// Decodes a chunk of an answer into `target`, if there is one. `None` when it does not fit.
    pub(super) fn decode_chunk(
        &mut self,
        place: Range<usize>,
        payload: &[u8],
        target: Option<&mut [f32]>,
    ) -> Option<()> {
        let decoder = self.decoder.as_mut()?;
        match (&mut self.base, target) {
            // The next difference is one to this answer, whether or not it was wanted.
            (Some(base), target) => {
                let base = &mut base[place];
                decoder.decode_add(payload, base).ok()?;
                target.into_iter().for_each(|target| target.copy_from_slice(base));
                Some(())
            }
            (None, Some(target)) => decoder.decode(payload, target).ok(),
            (None, None) => Some(()),
        }
    }

    /// The values of so many rows from a payload. `None` when it does not fit.
    pub(super) fn decode_rows(&mut self, layout: &Layout, rows: usize, payload: &[u8]) -> Option<Vec<f32>> {
        let elements =
            rows.checked_mul(layout.row_width()).filter(|&elements| elements <= limits::MAX_DATA_ELEMENTS)?;
        let mut values = vec![0.0; elements];
        self.decoder.as_mut()?.decode(payload, &mut values).ok()?;
        Some(values)
    }
}
