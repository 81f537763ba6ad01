//! libsvm text: a line is `label index:value index:value ...`, indices from 1 and ascending, `#` starts a comment.

use super::source::{Lines, Sink, malformed, quoted};
use super::{DataError, MAX_FEATURES, Place, SparseExamples};
use std::io::{self, Write};
use std::path::Path;

/// Reads a file, plain or gzip. Labels are 1, and -1 or 0: there are two classes. Feature `i` of the file becomes
/// `i - 1`.
pub fn read(path: &Path) -> Result<SparseExamples, DataError> {
    let mut lines = Lines::open(path)?;
    let mut examples = SparseExamples::default();
    let mut entries = Vec::new();
    while let Some((number, line)) = lines.next()? {
        let content = line.split('#').next().unwrap_or_default();
        let mut fields = content.split_ascii_whitespace();
        let Some(label) = fields.next() else { continue };
        entries.clear();
        let parsed = two_classes(label).ok_or_else(|| Wrong::new("the label 1, 0 or -1", label)).and_then(
            |positive| {
                let mut previous = 0;
                for field in fields {
                    let (index, value) = entry(field, previous)?;
                    entries.push((index - 1, value));
                    previous = index;
                }
                Ok(positive)
            },
        );
        let positive =
            parsed.map_err(|wrong| malformed(path, Place::Line(number), wrong.expected, wrong.found))?;
        examples.push(positive, entries.iter().copied());
    }
    if examples.is_empty() {
        return Err(malformed(path, Place::File, "at least one line `label index:value ...`", "none"));
    }
    Ok(examples)
}

/// Writes a file that [`read`] reads back; gzip when the path ends in `.gz`.
pub fn write(path: &Path, examples: &SparseExamples) -> io::Result<()> {
    let mut sink = Sink::create(path)?;
    for (index, &positive) in examples.labels().iter().enumerate() {
        write!(sink, "{}", if positive { "1" } else { "-1" })?;
        let (features, values) = examples.example(index);
        for (feature, value) in features.iter().zip(values) {
            write!(sink, " {}:{value}", feature + 1)?;
        }
        writeln!(sink)?;
    }
    sink.finish()
}

struct Wrong {
    expected: String,
    found: String,
}

impl Wrong {
    fn new(expected: impl Into<String>, found: &str) -> Wrong {
        Wrong { expected: expected.into(), found: quoted(found) }
    }
}

fn entry(field: &str, previous: u32) -> Result<(u32, f32), Wrong> {
    let Some((index, value)) = field.split_once(':') else {
        return Err(Wrong::new("`index:value`", field));
    };
    match index.parse() {
        Ok(index @ 1..=MAX_FEATURES) if index > previous => {
            let value = finite(value).ok_or_else(|| Wrong::new("a finite number after `:`", field))?;
            Ok((index, value))
        }
        Ok(1..=MAX_FEATURES) => {
            Err(Wrong::new(format!("an index above the one before it, {previous}"), field))
        }
        _ => Err(Wrong::new(format!("an index from 1 to {MAX_FEATURES}"), field)),
    }
}

/// Whether a label is the positive one. Others than these two are of a file with more classes, or with other ones.
fn two_classes(label: &str) -> Option<bool> {
    finite(label).filter(|label| [1.0, 0.0, -1.0].contains(label)).map(|label| label > 0.0)
}

fn finite(text: &str) -> Option<f32> {
    text.parse::<f32>().ok().filter(|value| value.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<SparseExamples, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.svm");
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn labels_indices_comments_and_blank_lines() {
        let examples =
            read_text("+1 1:0.5 7:-2e-1\n\n-1 3:1 # a comment\n0\n1.0 2:4\r\n# nothing\n").unwrap();
        assert_eq!(examples.labels(), [true, false, false, true]);
        assert_eq!(examples.example(0), (&[0, 6][..], &[0.5, -0.2][..]));
        assert_eq!(examples.example(1), (&[2][..], &[1.0][..]));
        assert_eq!(examples.example(2), (&[][..], &[][..]));
        assert_eq!(examples.width(), 7);
    }

    #[test]
    fn every_fault_is_named_with_its_line() {
        for (text, expected) in [
            ("", "expected at least one line"),
            ("1 1:1\nx 1:1\n", "line 2: expected the label 1, 0 or -1, found `x`"),
            ("nan 1:1\n", "line 1: expected the label"),
            ("1 1:1\n2 1:1\n", "line 2: expected the label 1, 0 or -1, found `2`"),
            ("0.5 1:1\n", "line 1: expected the label"),
            ("1 1:1\n\n1 0:1\n", "line 3: expected an index from 1 to 67108864, found `0:1`"),
            ("1 4294967296:1\n", "expected an index from 1"),
            ("1 -3:1\n", "expected an index from 1"),
            ("1 5:1 5:2\n", "expected an index above the one before it, 5, found `5:2`"),
            ("1 5:1 4:2\n", "expected an index above the one before it, 5, found `4:2`"),
            ("1 5:nan\n", "expected a finite number after `:`, found `5:nan`"),
            ("1 5:inf\n", "expected a finite number"),
            ("1 5:\n", "expected a finite number"),
            ("1 5\n", "expected `index:value`, found `5`"),
            ("1 qid:3 5:1\n", "expected an index from 1"),
        ] {
            let error = read_text(text).unwrap_err().to_string();
            assert!(error.contains("data.svm") && error.contains(expected), "{text:?}: {error}");
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let mut examples = SparseExamples::default();
        examples.push(true, [(0, 0.1), (9, -3.25e-7)]);
        examples.push(false, []);
        let folder = tempfile::tempdir().unwrap();
        for name in ["a.svm", "a.svm.gz"] {
            let path = folder.path().join(name);
            write(&path, &examples).unwrap();
            assert_eq!(read(&path).unwrap(), examples);
        }
    }
}
