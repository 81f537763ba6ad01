//! The rules of the house that neither rustc nor clippy checks. Each rule is a function from files to findings.

mod dependencies;
mod env_vars;
mod files;
mod licences;
mod links;
mod manifests;
mod names;
mod purity;
mod rust_source;
mod size;
mod text;
mod types;

use anyhow::{Result, bail};
use files::File;
use std::fmt;
use std::path::Path;

/// What a rule has to say about a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    severity: Severity,
    path: String,
    /// From 1; 0 when it is about the whole file.
    line: usize,
    message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Severity {
    Warning,
    Error,
}

impl Finding {
    fn error(path: &str, line: usize, message: impl Into<String>) -> Finding {
        Finding { severity: Severity::Error, path: path.to_owned(), line, message: message.into() }
    }

    fn warning(path: &str, line: usize, message: impl Into<String>) -> Finding {
        Finding { severity: Severity::Warning, ..Finding::error(path, line, message) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        match self.line {
            0 => write!(f, "{severity}: {}: {}", self.path, self.message),
            line => write!(f, "{severity}: {}:{line}: {}", self.path, self.message),
        }
    }
}

/// Checks the working tree; fails when any rule is broken.
pub(crate) fn run(root: &Path) -> Result<()> {
    let files = files::list(root)?;
    let mut findings = check_files(&files);
    findings.extend(dependencies::check(root, &files)?);
    for finding in &findings {
        eprintln!("{finding}");
    }
    let errors = findings.iter().filter(|finding| finding.severity == Severity::Error).count();
    if errors > 0 {
        bail!("tidy found {errors} broken rule{}", if errors == 1 { "" } else { "s" });
    }
    Ok(())
}

/// Every rule that needs only the files.
fn check_files(files: &[File]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files {
        findings.extend(text::check(file));
        findings.extend(names::check(file));
        findings.extend(manifests::check(file));
        findings.extend(links::check(file, files));
        if file.has_extension("rs") {
            let code = rust_source::mask(&file.text);
            findings.extend(size::check(file, &code));
            findings.extend(types::check(file, &code));
            findings.extend(purity::check(file, &code));
        }
    }
    findings.extend(env_vars::check(files));
    findings
}
