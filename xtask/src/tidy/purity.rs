//! Nothing in `core` knows what a socket, a thread, a file or a clock is.
//!
//! Clippy bans single types and methods; this catches whole modules, and it does not depend on what is called.

use super::Finding;
use super::files::File;
use super::rust_source::contains_word;

const CORE: &str = "crates/core/src/";
const MODULES: [&str; 5] = ["net", "thread", "fs", "env", "process"];
const TYPES: [&str; 4] = ["Instant", "SystemTime", "HashMap", "HashSet"];

/// `code` is the file with comments and strings masked.
pub(crate) fn check(file: &File, code: &str) -> Vec<Finding> {
    if !file.path.starts_with(CORE) {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for (index, line) in code.lines().enumerate() {
        for module in MODULES {
            if contains_word(line, &format!("std::{module}")) {
                findings.push(refusal(file, index + 1, &format!("std::{module}")));
            }
        }
        for name in TYPES {
            if contains_word(line, name) {
                findings.push(refusal(file, index + 1, name));
            }
        }
    }
    for (at, _) in code.match_indices("std::{") {
        let line = code[..at].matches('\n').count() + 1;
        for item in group_items(&code[at + "std::{".len()..]) {
            let module = item.split("::").next().unwrap_or(item).trim();
            if MODULES.contains(&module) {
                findings.push(refusal(file, line, &format!("std::{module}")));
            }
        }
    }
    findings
}

fn refusal(file: &File, line: usize, what: &str) -> Finding {
    Finding::error(
        &file.path,
        line,
        format!("`{what}` in core, which is pure: make it an input, or move it to a driver"),
    )
}

/// The items of a `use` group up to its closing brace, nested groups left whole.
fn group_items(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut items) = (0u32, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                items.push(&text[start..at]);
                return items;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                items.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::rust_source::mask;

    fn lines(path: &str, text: &str) -> Vec<usize> {
        check(&File::new(path, text), &mask(text)).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn the_outside_world_is_refused_in_core() {
        let here = "crates/core/src/server.rs";
        assert_eq!(lines(here, "use std::net::TcpStream;\n"), [1]);
        assert_eq!(lines(here, "\nlet now = Instant::now();\n"), [2]);
        assert_eq!(lines(here, "use std::{\n    fmt,\n    fs::{self, File},\n};\n"), [1]);
        assert_eq!(lines(here, "use std::collections::{BTreeMap, HashMap};\n"), [1]);
    }

    #[test]
    fn comments_strings_and_other_crates_are_free() {
        assert_eq!(lines("crates/core/src/a.rs", "// no std::net here\nf(\"Instant\");\n"), [0usize; 0]);
        assert_eq!(lines("crates/core/src/a.rs", "use std::{fmt, collections::BTreeMap};\n"), [0usize; 0]);
        assert_eq!(lines("crates/node/src/a.rs", "use std::net::TcpStream;\n"), [0usize; 0]);
    }
}
