//! The trait of byte compressors, and the choice `none`.

use super::Stage;
use crate::registry::Entry;
use std::fmt::Debug;

/// A byte compressor. One method is required.
pub trait Bytes: Send + Sync + Debug {
    /// Memory and tables to compress with, used again for every stretch.
    fn packer(&self) -> Box<dyn Packer>;
}

/// A byte compressor at work. Two methods are required.
pub trait Packer: Send + Sync + Debug {
    /// Appends `raw`, compressed. False when that fails; then the raw bytes travel.
    fn pack(&mut self, raw: &[u8], out: &mut Vec<u8>) -> bool;

    /// Fills `raw` from what was compressed. MUST NOT take memory beyond it, whatever the bytes say. The error
    /// completes "the payload has ...".
    fn unpack(&mut self, packed: &[u8], raw: &mut [u8]) -> Result<(), String>;
}

pub(super) const NONE_ENTRY: Entry<Stage> = Entry {
    name: "none",
    about: "No byte compressor; alone, no codec at all.",
    params: &[],
    example: "none",
    build: |spec| spec.config::<super::feedback::Nothing>().map(|_| Box::new(Stage::Bytes(None))),
};

/// The error of a compressor that cannot unpack bytes.
pub(super) fn broken(name: &str, why: &dyn std::fmt::Display) -> String {
    format!("bytes that {name} cannot unpack ({why})")
}

/// The error of a compressor whose output has another length than expected.
pub(super) fn wrong_length(name: &str, found: usize, expected: usize) -> String {
    format!("{found} bytes packed by {name} where there must be {expected}")
}

#[cfg(test)]
mod tests {
    use crate::codec::Codec;
    use crate::registry::Registry;

    #[test]
    fn bytes_that_do_not_unpack_to_their_length_are_refused_by_name() {
        let axis = Registry::builtin().codec;
        for name in ["lz4", "snappy", "zstd"] {
            let codec = Codec::parse(&axis, name).unwrap();
            let mut packer = codec.bytes.as_ref().unwrap().packer();
            let (raw, mut packed) = ([7; 100], Vec::new());
            assert!(packer.pack(&raw, &mut packed) && packed.len() < 50, "{name}");
            let mut back = [0; 100];
            assert_eq!((packer.unpack(&packed, &mut back), back), (Ok(()), raw), "{name}");
            let longer = packer.unpack(&packed, &mut [0; 101]).unwrap_err();
            assert!(
                longer.contains(name) && longer.contains("100 bytes") && longer.contains("101"),
                "{longer}"
            );
            for wrong in [packer.unpack(&packed, &mut [0; 99]), packer.unpack(&[0xFF; 9], &mut back)] {
                assert!(wrong.as_ref().is_err_and(|why| why.contains(name)), "{wrong:?}");
            }
        }
    }
}
