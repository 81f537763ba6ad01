//! Ratings as comma-separated text: `userId,movieId,rating`, then columns that are not read, such as a timestamp.

use super::source::{Lines, Sink, malformed, quoted};
use super::{DataError, Place, Rating};
use std::io::{self, Write};
use std::path::Path;

const FORM: &str = "`user,item,rating` with whole numbers from 0 to 4294967295 and a finite rating";

/// Reads a file, plain or gzip. A first line that does not begin with a digit is a header.
pub fn read(path: &Path) -> Result<Vec<Rating>, DataError> {
    let mut lines = Lines::open(path)?;
    let mut ratings = Vec::new();
    while let Some((number, line)) = lines.next()? {
        let line = line.trim();
        if line.is_empty() || (number == 1 && is_header(line)) {
            continue;
        }
        let rating = parse(line).ok_or_else(|| malformed(path, Place::Line(number), FORM, quoted(line)))?;
        ratings.push(rating);
    }
    if ratings.is_empty() {
        return Err(malformed(path, Place::File, format!("at least one line {FORM}"), "none"));
    }
    Ok(ratings)
}

/// Writes a file that [`read`] reads back; gzip when the path ends in `.gz`.
pub fn write(path: &Path, ratings: &[Rating]) -> io::Result<()> {
    let mut sink = Sink::create(path)?;
    writeln!(sink, "userId,movieId,rating,timestamp")?;
    for (time, Rating { user, item, value }) in ratings.iter().enumerate() {
        writeln!(sink, "{user},{item},{value},{time}")?;
    }
    sink.finish()
}

fn is_header(line: &str) -> bool {
    let columns: Vec<&str> = line.split(',').collect();
    columns.len() >= 3 && columns[..3].iter().all(|name| name.trim().starts_with(|c: char| c.is_alphabetic()))
}

fn parse(line: &str) -> Option<Rating> {
    let mut columns = line.split(',').map(str::trim);
    let (user, item) = (columns.next()?.parse().ok()?, columns.next()?.parse().ok()?);
    let value: f32 = columns.next()?.parse().ok()?;
    value.is_finite().then_some(Rating { user, item, value })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Vec<Rating>, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ratings.csv");
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn the_header_and_further_columns_are_optional() {
        let expected =
            [Rating { user: 1, item: 31, value: 2.5 }, Rating { user: 4_294_967_295, item: 0, value: -1.0 }];
        for text in [
            "userId,movieId,rating,timestamp\r\n1,31,2.5,1260759144\r\n4294967295,0,-1,5\r\n",
            "user, item, rating\n1, 31, 2.5\n\n4294967295,0,-1",
            "1,31,2.5\n4294967295,0,-1.0\n",
        ] {
            assert_eq!(read_text(text).unwrap(), expected);
        }
    }

    #[test]
    fn every_fault_is_named_with_its_line() {
        for (text, expected) in [
            ("", ": expected at least one line `user,item,rating`"),
            ("userId,movieId,rating\n", "expected at least one line"),
            ("hello\n", "line 1: expected `user,item,rating`"),
            ("1,2,3\n1,2\n", "line 2: expected `user,item,rating`"),
            ("1,2,3\nuserId,movieId,rating\n", "line 2: expected"),
            ("1,2,nan\n", "found `1,2,nan`"),
            ("1,-2,3\n", "found `1,-2,3`"),
            ("4294967296,2,3\n", "found `4294967296,2,3`"),
        ] {
            let error = read_text(text).unwrap_err().to_string();
            assert!(error.contains("ratings.csv") && error.contains(expected), "{text:?}: {error}");
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let ratings = [Rating { user: 3, item: 5, value: 0.5 }, Rating { user: 1, item: 7, value: 3.75 }];
        let folder = tempfile::tempdir().unwrap();
        for name in ["r.csv", "r.csv.gz"] {
            let path = folder.path().join(name);
            write(&path, &ratings).unwrap();
            assert_eq!(read(&path).unwrap(), ratings);
        }
    }
}
