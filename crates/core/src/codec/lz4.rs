//! LZ4 blocks: the fastest of the byte compressors.

use super::Stage;
use super::bytes::{Bytes, Packer, broken, wrong_length};
use super::feedback::Nothing;
use crate::registry::Entry;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "lz4",
    about: "Byte compressor: LZ4.",
    params: &[],
    example: "bitmap+lz4",
    build: |spec| spec.config::<Nothing>().map(|_| Box::new(Stage::Bytes(Some(Box::new(Lz4))))),
};

#[derive(Debug)]
struct Lz4;

impl Bytes for Lz4 {
    fn packer(&self) -> Box<dyn Packer> {
        Box::new(Work)
    }
}

#[derive(Debug)]
struct Work;

impl Packer for Work {
    fn pack(&mut self, raw: &[u8], out: &mut Vec<u8>) -> bool {
        let start = out.len();
        out.resize(start + lz4_flex::block::get_maximum_output_size(raw.len()), 0);
        let packed = lz4_flex::block::compress_into(raw, &mut out[start..]);
        out.truncate(start + packed.as_ref().copied().unwrap_or(0));
        packed.is_ok()
    }

    fn unpack(&mut self, packed: &[u8], raw: &mut [u8]) -> Result<(), String> {
        let found = lz4_flex::block::decompress_into(packed, raw).map_err(|why| broken("lz4", &why))?;
        if found == raw.len() { Ok(()) } else { Err(wrong_length("lz4", found, raw.len())) }
    }
}
