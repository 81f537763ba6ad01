//! The receiver's end of a chain. It remembers nothing, and changes nothing before a payload is checked whole.

use super::container::{self, Container};
use super::matrix::{SHAPE_BYTES, Shape};
use super::payload::{Header, Layout, read_floats};
use super::{Codec, CodecError, Mask, Packer};
use crate::kernels;
use std::sync::Arc;

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

/// Where the values of a checked payload are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// All of them in `values`.
    Whole,
    /// Those of the mask in `values`.
    Masked,
    /// All of them in `product`.
    Product,
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
        match self.check(payload, values.len())? {
            Found::Whole => values.copy_from_slice(&self.values),
            Found::Product => values.copy_from_slice(&self.product),
            Found::Masked => {
                kernels::fill(values, 0.0);
                self.mask.put(&self.values, values);
            }
        }
        Ok(())
    }

    /// Adds what the payload has for as many values. After an error `sum` is as it was.
    pub fn decode_add(&mut self, payload: &[u8], sum: &mut [f32]) -> Result<(), CodecError> {
        match self.check(payload, sum.len())? {
            Found::Whole => kernels::add(sum, &self.values),
            Found::Product => kernels::add(sum, &self.product),
            Found::Masked => self.mask.add(&self.values, sum),
        }
        Ok(())
    }

    /// Reads and checks a payload for a stretch of `entries`. No more memory is taken than those need, whatever the
    /// payload says.
    fn check(&mut self, payload: &[u8], entries: usize) -> Result<Found, CodecError> {
        let refuse = |why: String| Err(CodecError::Payload(why));
        let (header, mut body) = Header::decode(payload)?;
        if header.tag != self.codec.tag() {
            return Err(CodecError::OtherCodec { expected: self.codec.to_string() });
        }
        let count = header.count as usize;
        let whole = matches!(header.layout, Layout::Raw | Layout::Dense);
        if count > entries || (whole && count != entries) || !Container::fits(header.layout, entries) {
            return refuse(format!("{count} values, laid out as {:?}, for {entries} entries", header.layout));
        }
        let value_bytes = match header.layout {
            Layout::Raw => 4 * count,
            _ => self.codec.value_bytes(count),
        };
        let place_bytes = match header.layout {
            Layout::LowRank => SHAPE_BYTES,
            layout => Container::place_bytes(layout, entries, count),
        };
        let expected = place_bytes + value_bytes;
        if header.packed {
            let Some(packer) = &mut self.packer else {
                return refuse("compressed bytes, and this codec has no byte compressor".into());
            };
            self.unpacked.resize(expected, 0);
            packer.unpack(body, &mut self.unpacked).map_err(CodecError::Payload)?;
            body = &self.unpacked;
        }
        if body.len() != expected {
            return refuse(format!("{} bytes of body where {expected} are needed", body.len()));
        }
        let (places, bytes) = body.split_at(place_bytes);
        self.values.resize(count, 0.0);
        match (&self.codec.quantiser, header.layout) {
            (_, Layout::Raw) | (None, _) => read_floats(bytes, &mut self.values),
            (Some(quantiser), _) => {
                quantiser.dequantise(bytes, &mut self.values).map_err(CodecError::Payload)?;
            }
        }
        if !kernels::all_finite(&self.values) {
            return refuse("NaN or Inf among its values".into());
        }
        if whole {
            return Ok(Found::Whole);
        }
        let Some(shape) = places.first_chunk::<SHAPE_BYTES>().filter(|_| header.layout == Layout::LowRank)
        else {
            container::read_places(header.layout, places, entries, count, &mut self.mask)
                .map_err(CodecError::Payload)?;
            return Ok(Found::Masked);
        };
        let shape = Shape::decode(shape, entries).map_err(CodecError::Payload)?;
        if shape.values(entries) != count {
            return refuse(format!("{count} values for matrices of {shape:?}"));
        }
        self.product.resize(entries, 0.0);
        shape.product(&self.values, &mut self.product);
        match kernels::all_finite(&self.product) {
            true => Ok(Found::Product),
            false => refuse("matrices whose product is not finite".into()),
        }
    }
}
