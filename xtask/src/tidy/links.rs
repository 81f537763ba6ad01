//! Links between documents lead somewhere.

use super::Finding;
use super::files::File;

/// Checks the relative links of a Markdown file against the files of the tree.
pub(crate) fn check(file: &File, files: &[File]) -> Vec<Finding> {
    if !file.has_extension("md") {
        return Vec::new();
    }
    let mut findings = Vec::new();
    let mut in_code = false;
    for (number, line) in file.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
            continue;
        }
        if in_code {
            continue;
        }
        for target in targets(&without_inline_code(line)) {
            if is_external(&target) {
                continue;
            }
            let path = target.split('#').next().unwrap_or_default();
            let resolved = resolve(&file.path, path);
            if !resolved.as_deref().is_some_and(|path| exists(path, files)) {
                findings.push(Finding::error(
                    &file.path,
                    number,
                    format!("the link `{target}` leads nowhere"),
                ));
            }
        }
    }
    findings
}

/// A link out of the tree, or to a heading of the same page.
fn is_external(target: &str) -> bool {
    target.contains("://") || target.starts_with("mailto:") || target.starts_with('#')
}

/// Targets of `[text](target)` and of `[name]: target`.
fn targets(line: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in line.match_indices("](") {
        let rest = &line[at + 2..];
        if let Some(end) = rest.find(')') {
            // A title may follow the target.
            found.extend(rest[..end].split_whitespace().next().map(str::to_owned));
        }
    }
    if line.starts_with('[')
        && let Some((_, target)) = line.split_once("]: ")
    {
        found.extend(target.split_whitespace().next().map(str::to_owned));
    }
    found
}

fn without_inline_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

/// `target` seen from `from`, as a path from the root; `None` when it leaves the tree.
fn resolve(from: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = match target.strip_prefix('/') {
        Some(_) => Vec::new(),
        None => from.split('/').collect::<Vec<_>>()[..from.matches('/').count()].to_vec(),
    };
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Whether it is a file of the tree, or a folder that holds one.
fn exists(path: &str, files: &[File]) -> bool {
    let folder = if path.is_empty() { String::new() } else { format!("{path}/") };
    files.iter().any(|file| file.path == path || file.path.starts_with(&folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(path: &str, text: &str) -> Vec<usize> {
        let files = ["README.md", "docs/wire.md", "crates/core/src/lib.rs"].map(|path| File::new(path, ""));
        check(&File::new(path, text), &files).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn links_to_files_and_folders_are_followed() {
        let good =
            "[a](docs/wire.md) [b](./docs/wire.md#header \"title\") [c](crates/core)\n\n[d]: docs/wire.md\n";
        assert_eq!(broken("README.md", good), [0usize; 0]);
        assert_eq!(broken("docs/wire.md", "[up](../README.md)\n"), [0usize; 0]);
        assert_eq!(broken("README.md", "ok\n[x](docs/gone.md)\n[y]: gone.md\n"), [2, 3]);
        assert_eq!(broken("README.md", "[out](../../elsewhere.md)\n"), [1]);
    }

    #[test]
    fn code_and_other_sites_are_left_alone() {
        let text = "```\n[a](gone.md)\n```\n`[b](gone.md)` [c](https://example.org) [d](#below)\n";
        assert_eq!(broken("README.md", text), [0usize; 0]);
    }
}
