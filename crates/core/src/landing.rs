//! Where payloads that a role receives belong, and how a driver puts them there without the role.
//!
//! An answer may have to be widened, decoded, or added to those before it. None of this needs the role, which other threads
//! may want meanwhile: a [`Destination`] has all that it takes. What belongs to a connection alone (a decoder, the sum of the
//! differences that came over it) has a small lock of its own, which nobody else wants at the same time but an application
//! that gives a slab of such a table back.

#![allow(
    clippy::disallowed_types,
    reason = "a driver decodes on another thread than the one that has the role"
)]

use crate::codec::{Decoder, half};
use crate::kernels::{self, Values};
use crate::region::Region;
use crate::store::Buffer;
use crate::wire::{DType, Flags, Header};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The place in a role's memory that a frame's payload belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Landing {
    /// The frame's chunk.
    pub chunk: u32,
    /// Its bytes in that memory.
    pub bytes: Range<usize>,
    /// Type of the elements there.
    pub memory: DType,
    /// Type of the elements that arrive; `None` where a codec made the payload.
    pub dtype: Option<DType>,
}

impl Landing {
    /// The place in that memory of elements of the table.
    pub fn new(chunk: u32, elements: Range<usize>, memory: DType, dtype: Option<DType>) -> Landing {
        let bytes = elements.start * memory.bytes()..elements.end * memory.bytes();
        Landing { chunk, bytes, memory, dtype }
    }

    /// Whether a payload may have so many bytes.
    pub fn may_have(&self, payload_bytes: usize) -> bool {
        self.dtype.is_none_or(|dtype| self.elements().len() * dtype.bytes() == payload_bytes)
    }

    /// Whether `found`, the header of the frame behind `before`, is that of the frame that was foreseen for this place.
    pub fn is_for(&self, before: &Header, found: &Header) -> bool {
        let foreseen = Header {
            chunk: self.chunk,
            part: before.part + 1,
            // These differ from frame to frame: LAST, and each chunk's own length, version and place.
            flags: before.flags.without(Flags::LAST).with(found.flags.only(Flags::LAST)),
            payload_bytes: found.payload_bytes,
            version: found.version,
            landing: found.landing,
            ..*before
        };
        *found == foreseen && self.may_have(found.payload_bytes as usize)
    }

    /// The elements of the table.
    fn elements(&self) -> Range<usize> {
        self.bytes.start / self.memory.bytes()..self.bytes.end / self.memory.bytes()
    }
}

/// What a role lends a driver for payloads that are about to arrive: the memory that they belong to, and what it takes to
/// put them there.
#[derive(Debug)]
pub struct Destination {
    /// `None` where they are not wanted any more. Differences are added up all the same.
    region: Option<Region>,
    decoder: Option<Arc<AnswerDecoder>>,
}

impl Destination {
    /// For payloads that arrive as elements.
    pub fn new(region: Region) -> Destination {
        Destination { region: Some(region), decoder: None }
    }

    /// For payloads that have to be decoded, or added to those before them.
    pub fn decoded(region: Option<Region>, decoder: Arc<AnswerDecoder>) -> Destination {
        Destination { region, decoder: Some(decoder) }
    }

    /// The memory, where payloads may be received to this place as they are.
    pub fn direct(&mut self, place: &Landing) -> Option<&mut Region> {
        let is_direct = self.decoder.is_none() && place.dtype == Some(place.memory);
        self.region.as_mut().filter(|_| is_direct)
    }

    /// Whether payloads are differences to those before them, so that none may be put before an earlier one.
    pub fn is_ordered(&self) -> bool {
        self.decoder.as_ref().is_some_and(|decoder| decoder.base.is_some())
    }

    /// The memory.
    pub fn region(&self) -> Option<&Region> {
        self.region.as_ref()
    }

    /// Whether a payload lies at its place already: a peer that shares the memory has put it there.
    pub fn holds(&mut self, place: &Landing, payload: &[u8]) -> bool {
        self.direct(place).is_some_and(|region| region.holds(place.bytes.clone(), payload))
    }

    /// Puts a payload to its place. False where it does not fit; then nothing has changed.
    pub fn put(&mut self, place: &Landing, payload: &[u8]) -> bool {
        if !place.may_have(payload.len()) {
            return false;
        }
        if let Some(region) = self.direct(place) {
            region.bytes_mut(place.bytes.clone()).copy_from_slice(payload);
            return true;
        }
        let Destination { region, decoder } = self;
        let target = region.as_mut().map(|region| region.bytes_mut(place.bytes.clone()));
        let Some(dtype) = place.dtype else {
            return decoder.as_ref().is_some_and(|decoder| decoder.decode(place, payload, target));
        };
        let Some(values) = dtype.values(payload) else { return false };
        if let Some(mut base) = decoder.as_ref().and_then(|decoder| decoder.base()) {
            kernels::copy(floats_of(&mut base, place.elements()), values);
        }
        target.into_iter().for_each(|target| write(place.memory, values, target));
        true
    }
}

/// Writes values to memory that has elements of this type.
fn write(memory: DType, values: Values<'_>, target: &mut [u8]) {
    match memory {
        DType::F32 => kernels::copy(bytemuck::cast_slice_mut(target), values),
        // Only what is not finite, or was asked for under another codec, comes as something else.
        memory => half::write_any(memory, &values.to_vec(), target),
    }
}

/// Elements of a table in memory for single-precision ones.
fn floats_of(region: &mut Region, elements: Range<usize>) -> &mut [f32] {
    bytemuck::cast_slice_mut(region.bytes_mut(elements.start * 4..elements.end * 4))
}

/// Decodes the answers of one shard about one table.
#[derive(Debug)]
pub struct AnswerDecoder {
    decoder: SharedDecoder,
    /// Where answers are differences: the sum of all answers so far, whether or not the application saw it. It is the shard's
    /// part of memory for the whole table.
    base: Option<Mutex<Region>>,
}

/// A decoder of a connection, for all tables whose answers come over it by the same codec: one at a time.
#[derive(Debug, Clone)]
pub struct SharedDecoder(Arc<Mutex<Decoder>>);

impl SharedDecoder {
    /// Shares a decoder.
    pub fn new(decoder: Decoder) -> SharedDecoder {
        SharedDecoder(Arc::new(Mutex::new(decoder)))
    }

    /// Whether this is the only one that is left of it.
    pub fn is_alone(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Replaces `values` by what the payload has for as many. False where it does not fit; then they are as they were.
    pub fn decode(&self, payload: &[u8], values: &mut [f32]) -> bool {
        lock(&self.0).decode(payload, values).is_ok()
    }

    fn decode_onto(&self, payload: &[u8], held: &mut [f32]) -> bool {
        lock(&self.0).decode_onto(payload, held).is_ok()
    }
}

impl AnswerDecoder {
    /// With this memory for sums, where answers are differences.
    pub fn new(decoder: SharedDecoder, base: Option<Region>) -> AnswerDecoder {
        AnswerDecoder { decoder, base: base.map(Mutex::new) }
    }

    /// The decoder.
    pub fn decoder(&self) -> &SharedDecoder {
        &self.decoder
    }

    /// Copies the sum of all answers so far, where answers are differences, to memory for the whole table.
    pub fn copy_base(&self, to: &mut Buffer) {
        let Some(base) = self.base() else { return };
        for range in base.ranges() {
            to.as_mut_bytes()[range.clone()].copy_from_slice(base.bytes(range.clone()));
        }
    }

    fn base(&self) -> Option<MutexGuard<'_, Region>> {
        self.base.as_ref().map(lock)
    }

    /// Decodes a payload for this place into `target`, if there is one. False where it does not fit.
    fn decode(&self, place: &Landing, payload: &[u8], target: Option<&mut [u8]>) -> bool {
        let elements = place.elements();
        if let Some(mut base) = self.base() {
            // The next difference is one to this answer, whether or not it was wanted.
            let base = floats_of(&mut base, elements);
            let fits = self.decoder.decode_onto(payload, base);
            target.filter(|_| fits).into_iter().for_each(|to| write(place.memory, Values::F32(base), to));
            return fits;
        }
        match target {
            None => true,
            Some(target) if place.memory == DType::F32 => {
                self.decoder.decode(payload, bytemuck::cast_slice_mut(target))
            }
            // The codec has changed since the answer was asked for.
            Some(target) => {
                let mut values = vec![0.0; elements.len()];
                let fits = self.decoder.decode(payload, &mut values);
                if fits {
                    write(place.memory, Values::F32(&values), target);
                }
                fits
            }
        }
    }
}

/// Nothing is left half-done by a panic that a later payload could not be decoded after.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "a part may have one range")]
mod tests {
    use super::*;
    use crate::codec::{Codec, Context, Encoder};
    use crate::region::{Divided, Partition};
    use crate::registry::Registry;
    use crate::types::TableId;
    use crate::wire::Kind;

    #[test]
    fn the_frame_that_was_foreseen_is_the_next_part_of_the_same_answer_for_that_chunk() {
        let before = Header {
            table: TableId(2),
            request: 5,
            clock: 3,
            chunk: 7,
            part: 1,
            payload_bytes: 64,
            ..Header::new(Kind::Params)
        };
        let landing = Landing { chunk: 8, bytes: 64..192, memory: DType::F32, dtype: Some(DType::F32) };
        let next = Header { chunk: 8, part: 2, payload_bytes: 128, ..before };
        assert!(landing.is_for(&before, &next));
        let last = Header { flags: Flags::LAST, version: 9, landing: 1 << 20, ..next };
        assert!(landing.is_for(&before, &last), "each has its own version and place");
        for (what, other) in [
            ("chunk", Header { chunk: 7, ..next }),
            ("part", Header { part: 1, ..next }),
            ("length", Header { payload_bytes: 64, ..next }),
            ("table", Header { table: TableId(1), ..next }),
            ("request", Header { request: 6, ..next }),
            ("clock", Header { clock: 4, ..next }),
            ("kind", Header { kind: Kind::Push, ..next }),
            ("form", Header { flags: Flags::ENCODED, ..next }),
        ] {
            assert!(!landing.is_for(&before, &other), "another {what}");
        }
        // A codec makes payloads of any length.
        let [before, next] = [before, next].map(|header| Header { flags: Flags::ENCODED, ..header });
        let landing = Landing { dtype: None, ..landing };
        assert!(
            [1, 64, 500]
                .iter()
                .all(|&bytes| landing.is_for(&before, &Header { payload_bytes: bytes, ..next }))
        );
        assert!(!landing.is_for(&before, &Header { flags: Flags::LAST, ..next }), "this one is not encoded");
    }

    #[test]
    fn halves_are_widened_at_their_place() {
        let partition = Arc::new(Partition::new(32, [vec![8..16, 16..24], vec![0..8, 24..32]]));
        let divided = Divided::new(Buffer::zeroed(8), partition);
        let mut destination = Destination::new(divided.lend(0).expect("it is free"));
        let before = Header { part: 0, payload_bytes: 8, dtype: DType::F16, ..Header::new(Kind::Params) };
        let landing = Landing { chunk: 3, bytes: 8..24, memory: DType::F32, dtype: Some(DType::F16) };
        assert!(landing.is_for(&before, &Header { part: 1, chunk: 3, ..before }));
        assert!(!landing.is_for(&before, &Header { part: 1, chunk: 3, payload_bytes: 16, ..before }));
        let halves: [u16; 4] = [0x3c00, 0x4000, 0xbc00, 0];
        assert!(destination.put(&landing, bytemuck::cast_slice(&halves)));
        assert!(destination.direct(&landing).is_none(), "they cannot be received there as they are");
        assert!(!destination.put(&landing, &[0; 16]), "too many");
        drop(destination);
        let buffer = divided.reclaim().expect("nothing is lent");
        assert_eq!(buffer.as_slice(), [0.0, 0.0, 1.0, 2.0, -1.0, 0.0, 0.0, 0.0]);
    }

    const ELEMENTS: usize = 64;

    /// Memory for a table of two shards: the first has the middle, and the second the ends.
    fn divided() -> Divided {
        let parts = [vec![64..192], vec![0..64, 192..256]];
        Divided::new(Buffer::zeroed(ELEMENTS), Arc::new(Partition::new(4 * ELEMENTS, parts)))
    }

    fn codec(text: &str) -> Arc<Codec> {
        Arc::new(Codec::parse(&Registry::builtin().codec, text).unwrap())
    }

    fn shared(codec: &Arc<Codec>) -> SharedDecoder {
        SharedDecoder::new(Decoder::new(codec.clone()))
    }

    fn payload(codec: &Arc<Codec>, values: &[f32]) -> Vec<u8> {
        let mut bytes = Vec::new();
        Encoder::without_memory(codec.clone()).encode(0, values, &Context::default(), &mut bytes).unwrap();
        bytes
    }

    fn values(first: f32) -> Vec<f32> {
        (0..32).map(|at| first + at as f32).collect()
    }

    fn may_go_to_another_thread<T: Send + 'static>(value: T) -> T {
        value
    }

    /// Every shard has a decoder, a part of the sums and a part of the memory, and needs nothing else.
    #[test]
    fn shards_decode_at_the_same_time_without_the_role() {
        let codec = codec("topk:0.1");
        let (memory, sums) = (divided(), divided());
        let decoders = [0, 1].map(|shard| Arc::new(AnswerDecoder::new(shared(&codec), sums.lend(shard))));
        let places = [
            vec![Landing::new(0, 16..48, DType::F32, None)],
            vec![
                Landing::new(1, 0..16, DType::F32, Some(DType::F32)),
                Landing::new(2, 48..64, DType::F32, None),
            ],
        ];
        let whole: Vec<u8> = bytemuck::cast_slice(&values(1.0)[..16]).to_vec();
        let payloads =
            [vec![payload(&codec, &values(-50.0))], vec![whole, payload(&codec, &values(7.0)[..16])]];
        let mut destinations =
            [0, 1].map(|shard| Destination::decoded(memory.lend(shard), decoders[shard].clone()));
        for (shard, at) in [(1, 0), (0, 0), (1, 1)] {
            let (destination, place) = (&mut destinations[shard], &places[shard][at]);
            assert!(destination.is_ordered() && destination.direct(place).is_none());
            assert!(destination.put(place, &payloads[shard][at]));
        }
        drop(may_go_to_another_thread(destinations));
        let mut expected = [0.0; ELEMENTS];
        expected[..16].copy_from_slice(&values(1.0)[..16]);
        let mut decoder = Decoder::new(codec);
        decoder.decode(&payloads[0][0], &mut expected[16..48]).unwrap();
        decoder.decode(&payloads[1][1], &mut expected[48..]).unwrap();
        assert_eq!(memory.reclaim().expect("nothing is lent").as_slice(), expected);
        let mut sum = Buffer::zeroed(ELEMENTS);
        decoders.iter().for_each(|decoder| decoder.copy_base(&mut sum));
        assert_eq!(sum.as_slice(), expected);
    }

    #[test]
    fn differences_are_added_up_whether_or_not_they_are_wanted() {
        let codec = codec("onebit");
        let (memory, sums) = (divided(), divided());
        let decoder = Arc::new(AnswerDecoder::new(shared(&codec), sums.lend(0)));
        let place = Landing::new(0, 16..48, DType::F32, None);
        let difference = payload(&codec, &values(-16.0));
        let mut expected = values(100.0);
        let whole: Vec<u8> = bytemuck::cast_slice(&expected).to_vec();
        let mut unwanted = Destination::decoded(None, decoder.clone());
        assert!(unwanted.put(&Landing { dtype: Some(DType::F32), ..place.clone() }, &whole));
        assert!(unwanted.put(&place, &difference) && unwanted.region().is_none());
        let mut wanted = Destination::decoded(memory.lend(0), decoder);
        assert!(wanted.put(&place, &difference));
        (0..2).for_each(|_| Decoder::new(codec.clone()).decode_add(&difference, &mut expected).unwrap());
        drop(wanted);
        assert_eq!(memory.reclaim().expect("nothing is lent").as_slice()[16..48], expected);
    }

    #[test]
    fn a_payload_that_does_not_fit_changes_nothing() {
        for (text, has_sums) in [("int8", false), ("topk:0.5", true)] {
            let codec = codec(text);
            let (memory, sums) = (divided(), divided());
            let base = sums.lend(0).filter(|_| has_sums);
            let decoder = Arc::new(AnswerDecoder::new(shared(&codec), base));
            let mut destination = Destination::decoded(memory.lend(0), decoder.clone());
            let place = Landing::new(0, 16..48, DType::F32, None);
            let good = payload(&codec, &values(1.0));
            assert!(destination.put(&place, &good));
            let sum = |decoder: &AnswerDecoder| {
                let mut sum = Buffer::zeroed(ELEMENTS);
                decoder.copy_base(&mut sum);
                sum.as_slice().to_vec()
            };
            let before = (destination.region().unwrap().bytes(64..192).to_vec(), sum(&decoder));
            let other = payload(&self::codec("snappy"), &values(1.0));
            for bad in [&good[..good.len() - 1], &[], &other] {
                assert!(!destination.put(&place, bad));
            }
            let plain = Landing { dtype: Some(DType::F32), ..place.clone() };
            assert!(!destination.put(&plain, &[0; 124]), "an element is missing");
            let after = (destination.region().unwrap().bytes(64..192).to_vec(), sum(&decoder));
            assert!(before == after, "{text}");
            let mut without_codec = Destination::new(divided().lend(0).unwrap());
            assert!(!without_codec.put(&place, &good));
        }
    }

    /// An answer that was asked for as halves comes by another codec, which holds by now.
    #[test]
    fn what_a_codec_made_is_stored_as_halves_where_the_memory_has_them() {
        let codec = codec("int8");
        let mut expected = values(1.0);
        let bytes = payload(&codec, &expected);
        Decoder::new(codec.clone()).decode(&bytes, &mut expected).unwrap();
        let parts = Arc::new(Partition::new(4 * ELEMENTS, [vec![32..96], vec![0..32, 96..256]]));
        let memory = Divided::new(Buffer::zeroed(ELEMENTS), parts);
        let decoder = Arc::new(AnswerDecoder::new(shared(&codec), None));
        let mut destination = Destination::decoded(memory.lend(0), decoder);
        assert!(destination.put(&Landing::new(0, 16..48, DType::Bf16, None), &bytes));
        let mut halves = [0; 64];
        half::write_any(DType::Bf16, &expected, &mut halves);
        assert_eq!(destination.region().unwrap().bytes(32..96), halves);
    }
}
