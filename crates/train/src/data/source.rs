//! Opening files that may be compressed, and reading lines from them within bounds.

use super::{DataError, MAX_LINE_BYTES, MAX_UNPACKED_BYTES, Place};
use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// A file's content; what is gzip by its first bytes is unpacked, whatever the file is called.
pub(super) struct Source {
    pub(super) path: PathBuf,
    reader: Box<dyn BufRead>,
    /// Unpacked bytes at most; what a plain file holds when it is not compressed.
    pub(super) limit: u64,
}

impl Source {
    pub(super) fn open(path: &Path) -> Result<Source, DataError> {
        Source::open_bounded(path, MAX_UNPACKED_BYTES)
    }

    fn open_bounded(path: &Path, max_unpacked: u64) -> Result<Source, DataError> {
        let refused = |why| DataError::Io { path: path.to_owned(), why };
        let metadata = std::fs::metadata(path).map_err(refused)?;
        if metadata.is_dir() {
            return Err(malformed(path, Place::File, "a file", "a folder"));
        }
        let mut reader = BufReader::new(File::open(path).map_err(refused)?);
        let compressed = reader.fill_buf().map_err(refused)?.starts_with(&GZIP_MAGIC);
        Ok(if compressed {
            let unpacked = Bounded { inner: MultiGzDecoder::new(reader), left: max_unpacked };
            Source { path: path.to_owned(), reader: Box::new(BufReader::new(unpacked)), limit: max_unpacked }
        } else {
            Source { path: path.to_owned(), reader: Box::new(reader), limit: metadata.len() }
        })
    }

    /// Fills `bytes`, or says at which byte the file ends.
    pub(super) fn read_exact(&mut self, bytes: &mut [u8], at: u64) -> Result<(), DataError> {
        let found = self.read_at_most(bytes.len() as u64, at)?;
        if found.len() < bytes.len() {
            let place = Place::Byte(at + found.len() as u64);
            let expected = format!("{} more bytes", bytes.len() - found.len());
            return Err(malformed(&self.path, place, expected, "the end of the file"));
        }
        bytes.copy_from_slice(&found);
        Ok(())
    }

    /// Reads up to `count` bytes. Memory grows with what the file really holds, not with what it promises.
    pub(super) fn read_at_most(&mut self, count: u64, at: u64) -> Result<Vec<u8>, DataError> {
        let mut bytes = Vec::new();
        let result = self.reader.by_ref().take(count).read_to_end(&mut bytes);
        match result {
            Ok(_) => Ok(bytes),
            Err(error) => Err(self.failed(error, Place::Byte(at + bytes.len() as u64))),
        }
    }

    fn failed(&self, error: io::Error, place: Place) -> DataError {
        let path = self.path.clone();
        if error.get_ref().is_some_and(|inner| inner.is::<BoundReached>()) {
            return DataError::TooLarge {
                path,
                place,
                what: "the unpacked content".into(),
                limit: self.limit,
            };
        }
        match error.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
                malformed(&self.path, place, "an undamaged gzip file", error)
            }
            _ => DataError::Io { path, why: error },
        }
    }
}

/// The lines of a text file, numbered from 1, without their ends.
pub(super) struct Lines {
    source: Source,
    line: Vec<u8>,
    number: u64,
}

impl Lines {
    pub(super) fn open(path: &Path) -> Result<Lines, DataError> {
        Ok(Lines { source: Source::open(path)?, line: Vec::new(), number: 0 })
    }

    /// The next line and its number.
    pub(super) fn next(&mut self) -> Result<Option<(u64, &str)>, DataError> {
        self.line.clear();
        self.number += 1;
        let place = Place::Line(self.number);
        let bound = MAX_LINE_BYTES as u64 + 1;
        let result = self.source.reader.by_ref().take(bound).read_until(b'\n', &mut self.line);
        let count = result.map_err(|error| self.source.failed(error, place))?;
        let path = &self.source.path;
        if count == 0 {
            return Ok(None);
        }
        if count as u64 == bound {
            let (path, limit) = (path.clone(), MAX_LINE_BYTES as u64);
            return Err(DataError::TooLarge {
                path,
                place,
                what: "the length of the line in bytes".into(),
                limit,
            });
        }
        match std::str::from_utf8(&self.line) {
            Ok(text) => Ok(Some((self.number, text.trim_end_matches(['\n', '\r'])))),
            Err(_) => Err(malformed(path, place, "text in UTF-8", "other bytes")),
        }
    }
}

/// A writer that compresses when the path ends in `.gz`; [`Sink::finish`] must be called.
pub(super) enum Sink {
    Plain(BufWriter<File>),
    Gzip(GzEncoder<BufWriter<File>>),
}

impl Sink {
    pub(super) fn create(path: &Path) -> io::Result<Sink> {
        let file = BufWriter::new(File::create(path)?);
        Ok(match path.extension() {
            Some(extension) if extension == "gz" => Sink::Gzip(GzEncoder::new(file, Compression::fast())),
            _ => Sink::Plain(file),
        })
    }

    /// Writes out everything; without it a failure at the end would go unseen.
    pub(super) fn finish(self) -> io::Result<()> {
        match self {
            Sink::Plain(mut file) => file.flush(),
            Sink::Gzip(encoder) => encoder.finish()?.flush(),
        }
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Sink::Plain(file) => file.write(bytes),
            Sink::Gzip(encoder) => encoder.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Sink::Plain(file) => file.flush(),
            Sink::Gzip(encoder) => encoder.flush(),
        }
    }
}

/// An error about content.
pub(super) fn malformed(
    path: &Path,
    place: Place,
    expected: impl Into<String>,
    found: impl fmt::Display,
) -> DataError {
    DataError::Malformed { path: path.to_owned(), place, expected: expected.into(), found: found.to_string() }
}

/// Text of a file as an error shows it: in quotes, and not the whole of a long line.
pub(super) fn quoted(text: &str) -> String {
    const SHOWN: usize = 40;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("`{}`...", text[..end].escape_debug()),
        None => format!("`{}`", text.escape_debug()),
    }
}

/// Fails once more than `left` bytes come out of it.
struct Bounded<R> {
    inner: R,
    left: u64,
}

#[derive(Debug, thiserror::Error)]
#[error("too much data")]
struct BoundReached;

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(bytes)?;
        match self.left.checked_sub(count as u64) {
            Some(left) => {
                self.left = left;
                Ok(count)
            }
            None => Err(io::Error::other(BoundReached)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, bytes: &[u8]) {
        let mut sink = Sink::create(path).unwrap();
        sink.write_all(bytes).unwrap();
        sink.finish().unwrap();
    }

    #[test]
    fn gzip_is_told_by_its_bytes_not_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let (packed, plain) = (folder.path().join("a.gz"), folder.path().join("b"));
        write(&packed, b"one\r\ntwo");
        std::fs::copy(&packed, &plain).unwrap();
        for path in [&packed, &plain] {
            let mut lines = Lines::open(path).unwrap();
            assert_eq!(lines.next().unwrap(), Some((1, "one")));
            assert_eq!(lines.next().unwrap(), Some((2, "two")));
            assert_eq!(lines.next().unwrap(), None);
        }
    }

    #[test]
    fn a_small_file_that_unpacks_into_much_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let bomb = folder.path().join("bomb.gz");
        write(&bomb, &vec![b'\n'; 1 << 20]);
        assert!(std::fs::metadata(&bomb).unwrap().len() < 8 << 10);
        let mut source = Source::open_bounded(&bomb, 1 << 16).unwrap();
        let error = source.read_at_most(u64::MAX, 0).unwrap_err();
        assert!(error.to_string().contains("the unpacked content exceeds the limit of 65536"), "{error}");
        let mut source = Source::open_bounded(&bomb, 1 << 20).unwrap();
        assert_eq!(source.read_at_most(u64::MAX, 0).unwrap().len(), 1 << 20);
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("long.gz");
        write(&path, &vec![b'1'; MAX_LINE_BYTES + 1]);
        let error = Lines::open(&path).unwrap().next().unwrap_err().to_string();
        assert!(error.contains("line 1: the length of the line in bytes exceeds"), "{error}");
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = |path: &Path| match Lines::open(path) {
            Ok(mut lines) => lines.next().unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        let missing = error(&folder.path().join("missing.gz"));
        assert!(missing.contains("missing.gz") && missing.contains("No such file"), "{missing}");
        assert!(error(folder.path()).contains("expected a file, found a folder"));

        let damaged = folder.path().join("damaged.gz");
        write(&damaged, &[7; 1000]);
        let mut bytes = std::fs::read(&damaged).unwrap();
        bytes.truncate(bytes.len() / 2);
        std::fs::write(&damaged, bytes).unwrap();
        assert!(error(&damaged).contains("expected an undamaged gzip file"), "{}", error(&damaged));

        let binary = folder.path().join("binary");
        write(&binary, &[0xff, 0xfe, b'\n']);
        assert!(error(&binary).contains("line 1: expected text in UTF-8"));
    }

    #[test]
    fn long_text_is_shown_in_part() {
        assert_eq!(quoted("a\tb"), "`a\\tb`");
        assert_eq!(quoted(&"é".repeat(50)), format!("`{}`...", "é".repeat(40)));
    }
}
