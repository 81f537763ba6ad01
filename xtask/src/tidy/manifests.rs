//! Every crate takes the lints of the workspace.

use super::Finding;
use super::files::File;

/// Checks a crate's `Cargo.toml`; other files pass, and manifests that are a workspace of their own.
pub(crate) fn check(file: &File) -> Option<Finding> {
    let is_crate =
        file.path.ends_with("/Cargo.toml") && has_line(file, "[package]") && !has_line(file, "[workspace]");
    if !is_crate || value(&file.text, "lints", "workspace") == Some("true") {
        return None;
    }
    Some(Finding::error(&file.path, 0, "add `[lints]` with `workspace = true`"))
}

fn has_line(file: &File, wanted: &str) -> bool {
    file.lines().any(|(_, line)| line.trim() == wanted)
}

/// The value of `key` in `[section]`, as written. Enough for one-line values in files that we write ourselves.
fn value<'a>(text: &'a str, section: &str, key: &str) -> Option<&'a str> {
    let header = format!("[{section}]");
    let body = text.lines().map(str::trim).skip_while(|line| *line != header).skip(1);
    body.take_while(|line| !line.starts_with('[')).find_map(|line| {
        let (own, value) = line.split_once('=')?;
        (own.trim() == key).then(|| value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_must_take_the_lints() {
        let good = "[package]\nname = \"a\"\n\n[lints]\nworkspace = true\n";
        let elsewhere = "[package]\nname = \"a\"\n\n[lints]\n\n[other]\nworkspace = true\n";
        assert_eq!(check(&File::new("crates/a/Cargo.toml", good)), None);
        assert!(check(&File::new("crates/a/Cargo.toml", elsewhere)).is_some());
        assert!(check(&File::new("crates/a/Cargo.toml", "[package]\n")).is_some());
        assert_eq!(check(&File::new("Cargo.toml", "[workspace]\n")), None);
    }
}
