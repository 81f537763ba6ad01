//! Rules for every line of text: white space, unfinished work, paths of somebody's machine.

use super::Finding;
use super::files::File;
use super::rust_source::contains_word;

// The patterns are written in pieces, so that this file does not break its own rules.
const UNFINISHED: [&str; 3] = [concat!("to", "do!"), concat!("unimple", "mented!"), concat!("#[ign", "ore")];
const UNFINISHED_WORDS: [&str; 2] = [concat!("FIX", "ME"), concat!("XX", "X")];
const MACHINE_PATHS: [&str; 6] = [
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
    concat!("/Us", "ers/"),
    concat!("/tmp", "/wt"),
    concat!("/tmp", "/target"),
];

/// Checks a file line by line.
pub(crate) fn check(file: &File) -> Vec<Finding> {
    if is_generated(file) {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for (number, line) in file.lines() {
        let mut refuse = |message: String| findings.push(Finding::error(&file.path, number, message));
        if line.contains('\t') {
            refuse("a tab; indent with spaces".to_owned());
        }
        if line.ends_with([' ', '\t', '\r']) {
            refuse("white space at the end of the line".to_owned());
        }
        if let Some(path) = MACHINE_PATHS.iter().find(|path| has_absolute_path(line, path)) {
            refuse(format!("`{path}` is a path of one machine; use a relative one"));
        }
        if file.has_extension("rs") {
            let unfinished = UNFINISHED.iter().find(|pattern| line.contains(*pattern));
            let word = UNFINISHED_WORDS.iter().find(|word| contains_word(line, word));
            if let Some(pattern) = unfinished.or(word) {
                refuse(format!("`{pattern}`: finish it, or open an issue and leave it out"));
            }
        }
    }
    if !file.text.is_empty() && !file.text.ends_with('\n') {
        let last = file.text.lines().count();
        findings.push(Finding::error(&file.path, last, "no newline at the end of the file"));
    }
    findings
}

/// Files that a tool writes keep the form the tool gives them.
fn is_generated(file: &File) -> bool {
    ["lock", "snap", "svg"].iter().any(|extension| file.has_extension(extension))
}

/// Whether `path` starts an absolute path in `line`, and is not the middle of a relative one or of a URL.
fn has_absolute_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || "._-~/*}>".contains(c))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<usize> {
        check(&File::new(path, text)).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn white_space() {
        assert_eq!(lines("a.md", "good\nbad \n\tbad\n"), [2, 3]);
        assert_eq!(lines("a.toml", "no newline"), [1]);
        assert_eq!(lines("a.snap", "left alone \n"), [0usize; 0]);
        assert_eq!(lines("empty.txt", ""), [0usize; 0]);
    }

    #[test]
    fn paths_of_a_machine() {
        assert_eq!(lines("a.md", &format!("see {}x/y\n", MACHINE_PATHS[0])), [1]);
        assert_eq!(lines("a.md", &format!("see `{}x/y`\n", MACHINE_PATHS[2])), [1]);
        assert_eq!(lines("a.md", &format!("see ..{}x/y\n", MACHINE_PATHS[0])), [0usize; 0]);
        assert_eq!(lines("a.md", &format!("https://a.org{}x\n", MACHINE_PATHS[2])), [0usize; 0]);
    }

    #[test]
    fn unfinished_work() {
        for pattern in UNFINISHED.iter().chain(&UNFINISHED_WORDS) {
            assert_eq!(lines("a.rs", &format!("x {pattern} y\n")), [1], "{pattern}");
        }
        // Temporary file names are made of these letters.
        assert_eq!(lines("a.rs", "name-XXXXXX\n"), [0usize; 0]);
    }
}
