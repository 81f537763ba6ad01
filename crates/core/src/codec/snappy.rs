//! Snappy: fast, the compressor of the Parameter Flow paper.

use super::Stage;
use super::bytes::{Bytes, Packer, broken, wrong_length};
use super::feedback::Nothing;
use crate::registry::Entry;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "snappy",
    about: "Byte compressor: snappy.",
    params: &[],
    example: "bitmap+snappy",
    build: |spec| spec.config::<Nothing>().map(|_| Box::new(Stage::Bytes(Some(Box::new(Snappy))))),
};

#[derive(Debug)]
struct Snappy;

impl Bytes for Snappy {
    fn packer(&self) -> Box<dyn Packer> {
        Box::new(Work { encoder: snap::raw::Encoder::new() })
    }
}

#[derive(Debug)]
struct Work {
    encoder: snap::raw::Encoder,
}

impl Packer for Work {
    fn pack(&mut self, raw: &[u8], out: &mut Vec<u8>) -> bool {
        let start = out.len();
        out.resize(start + snap::raw::max_compress_len(raw.len()), 0);
        let packed = self.encoder.compress(raw, &mut out[start..]);
        out.truncate(start + packed.as_ref().copied().unwrap_or(0));
        packed.is_ok()
    }

    fn unpack(&mut self, packed: &[u8], raw: &mut [u8]) -> Result<(), String> {
        let announced = snap::raw::decompress_len(packed).map_err(|why| broken("snappy", &why))?;
        if announced != raw.len() {
            return Err(wrong_length("snappy", announced, raw.len()));
        }
        snap::raw::Decoder::new().decompress(packed, raw).map_err(|why| broken("snappy", &why))?;
        Ok(())
    }
}
