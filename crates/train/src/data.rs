//! Data sets in memory, and the file formats they are read from and written to.

pub mod idx;
pub mod libsvm;
pub mod ratings;
mod source;

use std::fmt;
use std::io;
use std::path::PathBuf;

/// The most that is taken from one compressed file: a small file may claim to unpack into any length.
pub const MAX_UNPACKED_BYTES: u64 = 2 << 30;
/// The longest line of a text file.
pub const MAX_LINE_BYTES: usize = 16 << 20;
/// The largest feature index of a libsvm file; a dense copy of the weights is held for evaluation.
pub const MAX_FEATURES: u32 = 1 << 26;
/// The longest side of an image.
pub const MAX_IMAGE_SIDE: u32 = 256;

/// Why a workload or its data cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// No workload has this name.
    #[error("unknown workload `{name}`; known: {known}")]
    UnknownWorkload {
        /// What was given.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// The configuration, or what it makes of the data, cannot work.
    #[error("{why}")]
    Config {
        /// What does not fit, and what would.
        why: String,
    },
    /// The operating system refused.
    #[error("cannot open {}: {why}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Its reason.
        why: io::Error,
    },
    /// The content is not what the format demands.
    #[error("{}{place}: expected {expected}, found {found}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where in it.
        place: Place,
        /// What belongs there.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A bound was passed; nothing of that size was allocated.
    #[error("{}{place}: {what} exceeds the limit of {limit}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Where in it.
        place: Place,
        /// What is too large.
        what: String,
        /// The limit.
        limit: u64,
    },
}

/// A place in a file; it is displayed as what follows the path in an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A line of a text file, from 1.
    Line(u64),
    /// A byte of a binary file after unpacking, from 0.
    Byte(u64),
    /// The file as a whole.
    File,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line(line) => write!(f, ", line {line}"),
            Place::Byte(byte) => write!(f, ", byte {byte}"),
            Place::File => Ok(()),
        }
    }
}

/// Examples with a few features each and one of two labels.
#[derive(Debug, Clone, PartialEq)]
pub struct SparseExamples {
    labels: Vec<bool>,
    /// Example `i` has the entries `ends[i]..ends[i + 1]`.
    ends: Vec<usize>,
    features: Vec<u32>,
    values: Vec<f32>,
}

impl Default for SparseExamples {
    fn default() -> SparseExamples {
        SparseExamples { labels: Vec::new(), ends: vec![0], features: Vec::new(), values: Vec::new() }
    }
}

impl SparseExamples {
    /// Adds an example; features are counted from 0.
    pub fn push(&mut self, positive: bool, entries: impl IntoIterator<Item = (u32, f32)>) {
        for (feature, value) in entries {
            self.features.push(feature);
            self.values.push(value);
        }
        self.labels.push(positive);
        self.ends.push(self.features.len());
    }

    /// Number of examples.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no example.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Whether each example is positive.
    pub fn labels(&self) -> &[bool] {
        &self.labels
    }

    /// Features of an example and their values.
    pub fn example(&self, index: usize) -> (&[u32], &[f32]) {
        let range = self.ends[index]..self.ends[index + 1];
        (&self.features[range.clone()], &self.values[range])
    }

    /// One more than the largest feature.
    pub fn width(&self) -> u32 {
        self.features.iter().max().map_or(0, |&feature| feature + 1)
    }

    /// A copy of some examples.
    pub fn select(&self, examples: &[usize]) -> SparseExamples {
        let mut selected = SparseExamples::default();
        for &index in examples {
            let (features, values) = self.example(index);
            selected.push(self.labels[index], features.iter().copied().zip(values.iter().copied()));
        }
        selected
    }
}

/// A user's rating of an item, by the numbers of the file or by consecutive ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rating {
    /// Who.
    pub user: u32,
    /// What.
    pub item: u32,
    /// How much.
    pub value: f32,
}

/// Grey images with a label each, all of one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Images {
    /// Rows of an image.
    pub height: usize,
    /// Columns of an image.
    pub width: usize,
    /// `height * width` bytes for each image.
    pub pixels: Vec<u8>,
    /// One for each image.
    pub labels: Vec<u8>,
}

impl Images {
    /// Number of images.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no image.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The pixels of one image.
    pub fn image(&self, index: usize) -> &[u8] {
        let size = self.height * self.width;
        &self.pixels[index * size..(index + 1) * size]
    }

    /// Keeps the first `count` images.
    pub fn truncate(&mut self, count: usize) {
        let count = count.min(self.len());
        self.labels.truncate(count);
        self.pixels.truncate(count * self.height * self.width);
    }
}
