//! Files that are written by hand: config files and scenarios.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The longest file that is read. Nobody writes one that long; a device or a data file has no end, or not soon.
const MAX_BYTES: u64 = 16 << 20;

/// The text of a file, or of stdin for `-`.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    match path.as_os_str() == "-" {
        true => read_limited(io::stdin().lock()),
        false => read_limited(File::open(path)?),
    }
}

fn read_limited(source: impl Read) -> io::Result<String> {
    let mut text = String::new();
    let read = source.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    if read as u64 > MAX_BYTES {
        let why = format!("it is longer than {} MiB, which no such file is", MAX_BYTES >> 20);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(text)
}
