//! The receiving end of the codec of a table's answers.

use super::layout::Layout;
use crate::codec::{Codec, Decoder};
use crate::landing::{AnswerDecoder, SharedDecoder};
use crate::limits;
use crate::region::Divided;
use crate::store::Buffer;
use crate::types::ShardId;
use crate::wire::DType;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How answers of a table are read.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// The type of the elements that they come as, where a codec does not encode them.
    elements: Option<DType>,
    /// For each shard of the table, where answers may be encoded.
    decoders: Vec<Arc<AnswerDecoder>>,
    /// Memory for the sums of answers, where these are differences.
    base_bytes: usize,
}

/// The decoders of a worker's connections: a decoder's memory serves all tables whose answers come over one connection by the
/// same codec.
#[derive(Debug, Default)]
pub(super) struct Decoders(BTreeMap<(ShardId, String), SharedDecoder>);

impl Decoders {
    fn of(&mut self, shard: ShardId, codec: &Arc<Codec>) -> SharedDecoder {
        let decoder = self.0.entry((shard, codec.to_string()));
        decoder.or_insert_with(|| SharedDecoder::new(Decoder::new(codec.clone()))).clone()
    }

    /// Forgets those that no table has any more.
    pub(super) fn tidy(&mut self) {
        self.0.retain(|_, decoder| !decoder.is_alone());
    }
}

impl Answers {
    /// For answers of a table that this codec makes.
    pub(super) fn new(layout: &Layout, codec: Codec, decoders: &mut Decoders) -> Answers {
        let is_sparse = layout.is_sparse();
        let elements = codec.element_type().filter(|&dtype| !is_sparse || dtype == DType::F32);
        let (is_none, has_base) = (codec.is_none(), codec.is_for_differences() && !is_sparse);
        let base = has_base.then(|| {
            Divided::new(Buffer::zeroed(layout.elements()), Arc::clone(layout.partition(DType::F32)))
        });
        let codec = Arc::new(codec);
        let decoder = |(index, shard): (usize, ShardId)| {
            let base = base.as_ref().and_then(|base| base.lend(index));
            Arc::new(AnswerDecoder::new(decoders.of(shard, &codec), base))
        };
        let decoders = layout.shards().enumerate().filter(|_| !is_none).map(decoder).collect();
        Answers { elements, decoders, base_bytes: base.map_or(0, |base| base.memory_bytes()) }
    }

    /// The type of the elements that they come as, where a codec does not encode them.
    pub(super) fn elements(&self) -> Option<DType> {
        self.elements
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.base_bytes
    }

    /// Whether answers are differences, which have to be added up.
    pub(super) fn has_base(&self) -> bool {
        self.base_bytes > 0
    }

    /// Reads the answers of a shard; `None` where no codec makes them.
    pub(super) fn decoder(&self, shard: usize) -> Option<&Arc<AnswerDecoder>> {
        self.decoders.get(shard)
    }

    /// Replaces a table's values by the sum of all answers so far, where answers are differences.
    pub(super) fn copy_base(&self, to: &mut Buffer) {
        self.decoders.iter().for_each(|decoder| decoder.copy_base(to));
    }

    /// The values of so many rows from a shard's payload. `None` when it does not fit.
    pub(super) fn decode_rows(
        &self,
        layout: &Layout,
        shard: usize,
        rows: usize,
        payload: &[u8],
    ) -> Option<Vec<f32>> {
        let elements =
            rows.checked_mul(layout.row_width()).filter(|&elements| elements <= limits::MAX_DATA_ELEMENTS)?;
        let decoder = self.decoder(shard)?.decoder();
        let mut values = vec![0.0; elements];
        decoder.decode(payload, &mut values).then_some(values)
    }
}
