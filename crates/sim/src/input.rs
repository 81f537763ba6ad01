//! Files that are written by hand or measured: config files, scenarios, step traces.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The longest file that is read. Nobody writes one that long; a device or a data file has no end, or not soon.
const MAX_BYTES: u64 = 16 << 20;

/// The text of a file of at most 16 MiB.
pub fn read_file(path: impl AsRef<Path>) -> io::Result<String> {
    read_limited(File::open(path)?)
}

/// The text of a source of at most 16 MiB.
pub fn read_limited(source: impl Read) -> io::Result<String> {
    let mut text = String::new();
    let read = source.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    if read as u64 > MAX_BYTES {
        let why = format!("it is longer than {} MiB, which no such file is", MAX_BYTES >> 20);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(text)
}
