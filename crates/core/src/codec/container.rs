//! Containers, which encode the places of values: all of them in order, behind a bitmap, or behind their indices.

use super::Stage;
use super::feedback::Nothing;
use super::mask::Mask;
use super::payload::Layout;
use crate::registry::Entry;
use crate::spec::{Spec, SpecError};

/// A choice of layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Container {
    /// The shortest of all.
    #[default]
    Auto,
    /// Every value; zeros where nothing travels.
    Dense,
    /// Places, and the values that stand there.
    Index,
    /// A bit for each entry, and the values whose bit is set.
    Bitmap,
    /// Parameter Flow's rule: places above 80% zeros, every value below.
    Hybrid,
}

macro_rules! entry {
    ($constant:ident, $variant:ident, $name:literal, $about:literal, $example:literal) => {
        pub(super) const $constant: Entry<Stage> = Entry {
            name: $name,
            about: $about,
            params: &[],
            example: $example,
            build: |spec| build(spec, Container::$variant),
        };
    };
}

entry!(DENSE_ENTRY, Dense, "dense", "Container: every value, zeros included.", "threshold:0.001+dense+lz4");
entry!(
    INDEX_ENTRY,
    Index,
    "index",
    "Container: places in the chunk (16 bits) and values.",
    "topk:0.01+index"
);
entry!(BITMAP_ENTRY, Bitmap, "bitmap", "Container: a bit for each entry, and values.", "bitmap");
entry!(
    HYBRID_ENTRY,
    Hybrid,
    "hybrid",
    "Container: places and values above 80% zeros, every value below (Parameter Flow).",
    "dvf:delta=1e-3+hybrid+snappy"
);
entry!(
    AUTO_ENTRY,
    Auto,
    "auto",
    "Container: for each chunk the shortest of the others.",
    "threshold:0.001+auto"
);

fn build(spec: &Spec, container: Container) -> Result<Box<Stage>, SpecError> {
    spec.config::<Nothing>().map(|_| Box::new(Stage::Container(container)))
}

/// The longest stretch whose places fit 16 bits.
const INDEX16_ENTRIES: usize = 1 << 16;

impl Container {
    /// How `count` of `entries` values are laid out, where `bytes` says what so many values take.
    pub(super) fn layout(self, entries: usize, count: usize, bytes: impl Fn(usize) -> usize) -> Layout {
        let index = if entries <= INDEX16_ENTRIES { Layout::Index16 } else { Layout::Index32 };
        match self {
            Container::Dense => Layout::Dense,
            Container::Index => index,
            Container::Bitmap => Layout::Bitmap,
            // A share of zeros above 0.8 is a share of values below 0.2.
            Container::Hybrid if count * 5 < entries => index,
            Container::Hybrid => Layout::Dense,
            Container::Auto => {
                let packed = bytes(count);
                let candidates = [
                    (Container::place_bytes(index, entries, count) + packed, index),
                    (Container::place_bytes(Layout::Bitmap, entries, count) + packed, Layout::Bitmap),
                    (bytes(entries), Layout::Dense),
                ];
                candidates
                    .into_iter()
                    .min_by_key(|(size, _)| *size)
                    .map_or(Layout::Dense, |(_, layout)| layout)
            }
        }
    }

    /// Bytes that a layout takes to say where `count` of `entries` values stand. Those of gaps depend on the places.
    pub(super) fn place_bytes(layout: Layout, entries: usize, count: usize) -> usize {
        match layout {
            Layout::Raw | Layout::Dense | Layout::LowRank | Layout::Factors | Layout::Gaps => 0,
            Layout::Bitmap => Mask::bytes(entries),
            Layout::Index16 => 2 * count,
            Layout::Index32 => 4 * count,
        }
    }

    /// Whether places of a stretch of so many entries may be laid out so.
    pub(super) fn fits(layout: Layout, entries: usize) -> bool {
        layout != Layout::Index16 || entries <= INDEX16_ENTRIES
    }
}

/// Appends the places of a mask's bits.
pub(super) fn write_places(layout: Layout, mask: &Mask, out: &mut Vec<u8>) {
    match layout {
        Layout::Bitmap => mask.write(out),
        Layout::Index16 => mask.for_each(|at| out.extend_from_slice(&(at as u16).to_le_bytes())),
        Layout::Index32 => mask.for_each(|at| out.extend_from_slice(&(at as u32).to_le_bytes())),
        Layout::Raw | Layout::Dense | Layout::LowRank | Layout::Factors | Layout::Gaps => {}
    }
}

/// Reads places into a mask of `entries` bits. The error completes "the payload has ...".
pub(super) fn read_places(
    layout: Layout,
    bytes: &[u8],
    entries: usize,
    count: usize,
    mask: &mut Mask,
) -> Result<(), String> {
    let out_of_order = || Err("places out of order or beyond its end".to_owned());
    match layout {
        Layout::Raw | Layout::Dense | Layout::LowRank | Layout::Factors | Layout::Gaps => {}
        Layout::Bitmap => {
            if !mask.read(bytes, entries) || mask.count() != count {
                return Err(format!("a bitmap that does not have {count} of {entries} bits"));
            }
        }
        Layout::Index16 => {
            mask.reset(entries);
            let mut next = 0;
            for place in bytes.as_chunks::<2>().0 {
                let place = usize::from(u16::from_le_bytes(*place));
                if place < next || place >= entries {
                    return out_of_order();
                }
                mask.set(place);
                next = place + 1;
            }
        }
        Layout::Index32 => {
            mask.reset(entries);
            let mut next = 0;
            for place in bytes.as_chunks::<4>().0 {
                let place = u32::from_le_bytes(*place) as usize;
                if place < next || place >= entries {
                    return out_of_order();
                }
                mask.set(place);
                next = place + 1;
            }
        }
    }
    Ok(())
}
