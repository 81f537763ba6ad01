//! The receiver's end of a chain. It remembers nothing, and changes nothing before a payload is checked whole.

use super::container::{self, Container};
use super::delta;
use super::layer::LayerRange;
use super::payload::{Layout, Prefix, read_floats};
use super::products::{PIECE_HEAD_BYTES, PieceHead, Products};
use super::{Codec, CodecError, Content, Mask, Packer, Sparse};
use crate::kernels::{self, Values};
use crate::wire::DType;
use std::ops::Range;
use std::sync::Arc;

const NOT_FINITE: &str = "NaN or Inf among its values";

/// The receiver's end of a chain.
#[derive(Debug)]
pub struct Decoder {
    codec: Arc<Codec>,
    mask: Mask,
    values: Vec<f32>,
    unpacked: Vec<u8>,
    product: Vec<f32>,
    packer: Option<Box<dyn Packer>>,
}

impl Decoder {
    /// For payloads of this chain.
    pub fn new(codec: Arc<Codec>) -> Decoder {
        let packer = codec.bytes.as_ref().map(|bytes| bytes.packer());
        let (values, unpacked, product) = Default::default();
        Decoder { codec, mask: Mask::default(), values, unpacked, product, packer }
    }

    /// The chain.
    pub fn codec(&self) -> &Arc<Codec> {
        &self.codec
    }

    /// Replaces `values` by what the payload has for as many. After an error they are as they were.
    pub fn decode(&mut self, payload: &[u8], values: &mut [f32]) -> Result<(), CodecError> {
        self.read(payload, values.len())?.copy_to(values);
        Ok(())
    }

    /// Adds what the payload has for as many values. After an error `sum` is as it was.
    pub fn decode_add(&mut self, payload: &[u8], sum: &mut [f32]) -> Result<(), CodecError> {
        self.read(payload, sum.len())?.add_to(sum);
        Ok(())
    }

    /// Brings what a receiver holds to what a payload of differences says. After an error it is as it was.
    pub fn decode_onto(&mut self, payload: &[u8], held: &mut [f32]) -> Result<(), CodecError> {
        let replaces = self.codec.replaces().is_some();
        let content = self.read(payload, held.len())?;
        if replaces {
            content.put_to(held);
        } else {
            content.add_to(held);
        }
        Ok(())
    }

    /// What a payload says of a stretch of `entries`, checked whole: its values are finite, and where they belong. They
    /// stay where they were found; the next payload replaces them. No more memory is taken than `entries` need, whatever
    /// the payload says.
    pub fn read<'a>(&'a mut self, payload: &'a [u8], entries: usize) -> Result<Content<'a>, CodecError> {
        self.read_chunk(payload, 0..entries, Products::NONE)
    }

    /// The same for a chunk of a table, whose layers may have come as factors before.
    pub fn read_chunk<'a>(
        &'a mut self,
        payload: &'a [u8],
        chunk: Range<usize>,
        products: &Products,
    ) -> Result<Content<'a>, CodecError> {
        let refuse = |why: String| Err(CodecError::Payload(why));
        let entries = chunk.len();
        let Decoder { codec, mask, values, unpacked, product, packer } = self;
        let (prefix, body) = open(codec, payload)?;
        let count = prefix.count as usize;
        let whole = matches!(prefix.layout, Layout::Raw | Layout::Dense);
        if count > entries
            || (whole && count != entries)
            || !Container::fits(prefix.layout, entries)
            || prefix.layout == Layout::Factors
            || (prefix.layout == Layout::Gaps && codec.replaces().is_none())
        {
            return refuse(format!("{count} values, laid out as {:?}, for {entries} entries", prefix.layout));
        }
        let value_bytes = match prefix.layout {
            Layout::Raw => 4 * count,
            _ => codec.value_bytes(count),
        };
        let mut place_bytes = Container::place_bytes(prefix.layout, entries, count);
        if prefix.layout == Layout::Gaps {
            let rest = delta::read_gaps(body, entries, count, mask).map_err(CodecError::Payload)?;
            place_bytes = body.len() - rest.len();
        }
        let body = unpack(prefix, packer, body, place_bytes + value_bytes, unpacked)?;
        let (places, bytes) = body.split_at(place_bytes);
        let quantiser = codec.quantiser.as_ref().filter(|_| prefix.layout != Layout::Raw);
        if whole {
            // Values in an element type are added straight from the payload, unless it is not aligned for them.
            let view = match quantiser {
                None => DType::F32.values(bytes),
                Some(quantiser) => quantiser.element_type().and_then(|dtype| dtype.values(bytes)),
            };
            if let Some(view) = view {
                return if view.all_finite() { Ok(view.into()) } else { refuse(NOT_FINITE.into()) };
            }
        }
        values.resize(count, 0.0);
        match quantiser {
            None => read_floats(bytes, values),
            Some(quantiser) => quantiser.dequantise(bytes, values).map_err(CodecError::Payload)?,
        }
        if !kernels::all_finite(values) {
            return refuse(NOT_FINITE.into());
        }
        if whole {
            return Ok(Values::F32(values).into());
        }
        if prefix.layout == Layout::Gaps {
            return Ok(Content::Sparse(Sparse::new(mask, values)));
        }
        if prefix.layout != Layout::LowRank {
            container::read_places(prefix.layout, places, entries, count, mask)
                .map_err(CodecError::Payload)?;
            return Ok(Content::Sparse(Sparse::new(mask, values)));
        }
        let covered = products.covered(chunk.clone());
        if covered == 0 || covered + count != entries {
            return refuse(format!(
                "{count} values beside products, and factors came for {covered} of {entries} entries"
            ));
        }
        product.resize(entries, 0.0);
        products.fill(chunk.start, values, product);
        if kernels::all_finite(product) {
            Ok(Values::F32(product).into())
        } else {
            refuse("factors whose product is not finite".into())
        }
    }

    /// Takes a piece of a layer's factors. After an error `products` are as they were.
    pub fn take_factors(
        &mut self,
        payload: &[u8],
        layers: &[LayerRange],
        products: &mut Products,
    ) -> Result<(), CodecError> {
        let refuse = |why: String| Err(CodecError::Payload(why));
        let Decoder { codec, values, unpacked, packer, .. } = self;
        let (prefix, body) = open(codec, payload)?;
        if codec.low_rank.is_none() || prefix.layout != Layout::Factors {
            return refuse("factors, which this codec never makes".into());
        }
        let Some((head, body)) = body.split_first_chunk::<PIECE_HEAD_BYTES>() else {
            return refuse(format!("{} bytes of factors", body.len()));
        };
        let (head, count) = (PieceHead::decode(head), prefix.count as usize);
        // Its length is checked before memory is taken.
        products.check(head, count, layers).map_err(CodecError::Payload)?;
        let bytes = unpack(prefix, packer, body, codec.value_bytes(count), unpacked)?;
        values.resize(count, 0.0);
        match &codec.quantiser {
            None => read_floats(bytes, values),
            Some(quantiser) => quantiser.dequantise(bytes, values).map_err(CodecError::Payload)?,
        }
        if !kernels::all_finite(values) {
            return refuse(NOT_FINITE.into());
        }
        products.take(head, values, layers);
        Ok(())
    }
}

/// The prefix and the body of a payload that this chain made.
fn open<'a>(codec: &Codec, payload: &'a [u8]) -> Result<(Prefix, &'a [u8]), CodecError> {
    let (prefix, body) = Prefix::decode(payload)?;
    if prefix.tag != codec.tag() {
        return Err(CodecError::OtherCodec { expected: codec.to_string() });
    }
    Ok((prefix, body))
}

/// A body as it was before it went through the byte compressor, if it did. It has this many bytes, or is refused.
fn unpack<'a>(
    prefix: Prefix,
    packer: &mut Option<Box<dyn Packer>>,
    body: &'a [u8],
    expected: usize,
    unpacked: &'a mut Vec<u8>,
) -> Result<&'a [u8], CodecError> {
    let refuse = |why: String| Err(CodecError::Payload(why));
    if prefix.packed {
        let Some(packer) = packer else {
            return refuse("compressed bytes, and this codec has no byte compressor".into());
        };
        unpacked.resize(expected, 0);
        packer.unpack(body, unpacked).map_err(CodecError::Payload)?;
        return Ok(unpacked);
    }
    if body.len() != expected {
        return refuse(format!("{} bytes of body where {expected} are needed", body.len()));
    }
    Ok(body)
}
