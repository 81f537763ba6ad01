//! Zstandard: slower, and smaller, because it also codes by frequency.

use super::Stage;
use super::bytes::{Bytes, Packer, broken, wrong_length};
use crate::registry::{Entry, Param};
use serde::Deserialize;
use std::fmt;
use zstd::bulk::{Compressor, Decompressor};

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "zstd",
    about: "Byte compressor: Zstandard; also codes by frequency, which suits quantised values.",
    params: &[Param { name: "level", default: Some("1"), about: "Effort, 1 to 19." }],
    example: "bitmap+zstd",
    build: |spec| {
        let spec = spec.with_positional("level")?;
        let config: Zstd = spec.config()?;
        spec.require((1..=19).contains(&config.level), || {
            format!("level = {}: expected 1 to 19", config.level)
        })?;
        Ok(Box::new(Stage::Bytes(Some(Box::new(config)))))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Zstd {
    level: u8,
}

impl Default for Zstd {
    fn default() -> Zstd {
        Zstd { level: 1 }
    }
}

impl Bytes for Zstd {
    fn packer(&self) -> Box<dyn Packer> {
        Box::new(Work { level: self.level, compressor: None, decompressor: None })
    }
}

/// Its contexts take memory, and one end of a link needs only one of them.
struct Work {
    level: u8,
    compressor: Option<Compressor<'static>>,
    decompressor: Option<Decompressor<'static>>,
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("level", &self.level).finish_non_exhaustive()
    }
}

impl Packer for Work {
    fn pack(&mut self, raw: &[u8], out: &mut Vec<u8>) -> bool {
        if self.compressor.is_none() {
            self.compressor = Compressor::new(i32::from(self.level)).ok();
        }
        let Some(compressor) = &mut self.compressor else { return false };
        let start = out.len();
        out.resize(start + zstd::zstd_safe::compress_bound(raw.len()), 0);
        let packed = compressor.compress_to_buffer(raw, &mut out[start..]);
        out.truncate(start + packed.as_ref().copied().unwrap_or(0));
        packed.is_ok()
    }

    fn unpack(&mut self, packed: &[u8], raw: &mut [u8]) -> Result<(), String> {
        let decompressor = match &mut self.decompressor {
            Some(decompressor) => decompressor,
            empty => empty.insert(Decompressor::new().map_err(|why| broken("zstd", &why))?),
        };
        let found = decompressor.decompress_to_buffer(packed, raw).map_err(|why| broken("zstd", &why))?;
        if found == raw.len() { Ok(()) } else { Err(wrong_length("zstd", found, raw.len())) }
    }
}
