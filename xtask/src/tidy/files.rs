//! Which files are checked: those that git tracks or would track.

use anyhow::{Context, Result};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A text file of the working tree.
#[derive(Debug, Clone)]
pub(crate) struct File {
    /// Relative to the root, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl File {
    /// Whether the name ends with this extension.
    pub(crate) fn has_extension(&self, extension: &str) -> bool {
        Path::new(&self.path).extension().is_some_and(|own| own == extension)
    }

    /// Its lines, numbered from 1.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(index, line)| (index + 1, line))
    }

    /// A file that exists only in a test.
    #[cfg(test)]
    pub(crate) fn new(path: &str, text: &str) -> File {
        File { path: path.to_owned(), text: text.to_owned() }
    }
}

/// All text files below `root`, sorted by path. Binary files are left out.
pub(crate) fn list(root: &Path) -> Result<Vec<File>> {
    let mut paths = match tracked(root) {
        Some(paths) => paths,
        None => walk(root)?,
    };
    paths.sort();
    paths.dedup();
    let mut files = Vec::new();
    for path in paths {
        let full = root.join(&path);
        // A tracked file may have been deleted in the working tree; a link may point to a folder.
        if !full.is_file() {
            continue;
        }
        let bytes = fs::read(&full).with_context(|| format!("cannot read {path}"))?;
        if let Ok(text) = String::from_utf8(bytes)
            && !text.contains('\0')
        {
            files.push(File { path, text });
        }
    }
    Ok(files)
}

/// What git tracks, and what it would track; `None` without git or outside a clone.
fn tracked(root: &Path) -> Option<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .ok()?;
    if !output.status.success() {
        return None;
    }
    let listing = String::from_utf8(output.stdout).ok()?;
    Some(listing.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect())
}

/// Every file below `root` but build output and git's own.
fn walk(root: &Path) -> Result<Vec<String>> {
    let mut folders = vec![String::new()];
    let mut paths = Vec::new();
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(root.join(&folder)).with_context(|| format!("cannot list `{folder}`"))?;
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
            if entry.file_type()?.is_dir() {
                if name != ".git" && name != "target" {
                    folders.push(path);
                }
            } else {
                paths.push(path);
            }
        }
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_listing_find_this_file() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let here = "src/tidy/files.rs".to_owned();
        assert!(walk(root).unwrap().contains(&here));
        assert!(list(root).unwrap().iter().any(|file| file.path == here));
    }
}
