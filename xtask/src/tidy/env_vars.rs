//! Every environment variable is a documented constant in one file, and nowhere else made up.

use super::Finding;
use super::files::File;

const LIST: &str = "crates/node/src/env_vars.rs";
// In two pieces, so that this file names no variable.
const PREFIX: &str = concat!("PARA", "MILL_");
const EXTENSIONS: [&str; 4] = ["rs", "md", "toml", "sh"];

/// Variables that are named anywhere must be in the list. Without the list there is nothing to check.
pub(crate) fn check(files: &[File]) -> Vec<Finding> {
    let Some(list) = files.iter().find(|file| file.path == LIST) else { return Vec::new() };
    let known = variables(&list.text);
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| EXTENSIONS.iter().any(|extension| file.has_extension(extension))) {
        for (number, line) in file.lines() {
            for name in variables(line).into_iter().filter(|name| !known.contains(name)) {
                let message = format!("`{name}` is not documented in {LIST}");
                findings.push(Finding::error(&file.path, number, message));
            }
        }
    }
    findings
}

fn variables(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices(PREFIX) {
        let rest = &text[at..];
        let end = rest
            .find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'))
            .unwrap_or(rest.len());
        // `PREFIX*` in a sentence is no name.
        if end > PREFIX.len() {
            found.push(&rest[..end]);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_is_not_listed_is_found() {
        let list = File::new(LIST, &format!("/// Who I am.\npub const RANK: &str = \"{PREFIX}RANK\";\n"));
        let known = File::new("a.md", &format!("Set `{PREFIX}RANK` (all are `{PREFIX}*`).\n"));
        let unknown = File::new("b.rs", &format!("\nvar(\"{PREFIX}SECRET\")\n"));
        assert_eq!(check(&[list.clone(), known.clone()]), []);
        let findings = check(&[list, known, unknown.clone()]);
        assert_eq!(findings.len(), 1);
        assert_eq!((findings[0].path.as_str(), findings[0].line), ("b.rs", 2));
        assert_eq!(check(&[unknown]), [], "without the list nothing is checked");
    }
}
