//! A name says what is inside. Dumping grounds are refused by name.

use super::Finding;
use super::files::File;
use super::rust_source;

const REFUSED: [&str; 8] = ["utils", "util", "common", "base", "helpers", "helper", "manager", "misc"];

/// Checks the file's own path and the modules it declares.
pub(crate) fn check(file: &File) -> Vec<Finding> {
    if !file.has_extension("rs") {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for part in file.path.split('/') {
        let stem = part.strip_suffix(".rs").unwrap_or(part);
        // Beside integration tests cargo would take `name.rs` for a test of its own.
        if part == "mod.rs" && !file.path.contains("/tests/") {
            let message = "write `name.rs` beside the folder `name/`, not `name/mod.rs`";
            findings.push(Finding::error(&file.path, 0, message));
        } else if REFUSED.contains(&stem) {
            findings.push(Finding::error(&file.path, 0, refusal(stem)));
        }
    }
    for (index, line) in rust_source::mask(&file.text).lines().enumerate() {
        // A module in its own file is found by its path.
        if let Some(name) = inline_module(line)
            && REFUSED.contains(&name)
        {
            findings.push(Finding::error(&file.path, index + 1, refusal(name)));
        }
    }
    findings
}

fn refusal(name: &str) -> String {
    format!("`{name}` names no subject; name the module after what it holds")
}

/// The name in `mod name {`, whatever its visibility.
fn inline_module(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace().skip_while(|word| word.starts_with("pub"));
    if words.next()? != "mod" {
        return None;
    }
    let name = words.next()?;
    (words.next() == Some("{")).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(path: &str, text: &str) -> usize {
        check(&File::new(path, text)).len()
    }

    #[test]
    fn dumping_grounds_are_refused() {
        assert_eq!(messages("crates/core/src/utils.rs", ""), 1);
        assert_eq!(messages("crates/core/src/common/chunk.rs", ""), 1);
        assert_eq!(messages("crates/core/src/codec/mod.rs", ""), 1);
        assert_eq!(messages("crates/core/src/chunk.rs", "pub(crate) mod helpers {\n}\n"), 1);
    }

    #[test]
    fn subjects_are_accepted() {
        assert_eq!(messages("crates/core/src/database.rs", "mod tests {\n}\n// mod utils {\n"), 0);
        assert_eq!(messages("docs/common/README.md", ""), 0);
        assert_eq!(messages("crates/train/tests/reference/mod.rs", ""), 0);
    }
}
