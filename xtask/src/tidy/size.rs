//! Files stay small enough to be read in one sitting. Comments do not count: a limit on them would be a price on explaining.

use super::Finding;
use super::files::File;

const MAX_CODE_LINES: usize = 900;

/// `code` is the file with its comments masked.
pub(crate) fn check(file: &File, code: &str) -> Option<Finding> {
    let code_lines = code.lines().filter(|line| !line.trim().is_empty()).count();
    let message = || {
        format!(
            "{code_lines} lines of code, at most {MAX_CODE_LINES}; find the smaller types in it, and give each a file"
        )
    };
    (code_lines > MAX_CODE_LINES).then(|| Finding::error(&file.path, 0, message()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::{Severity, rust_source};

    fn severity(text: &str) -> Option<Severity> {
        check(&File::new("a.rs", text), &rust_source::mask(text)).map(|finding| finding.severity)
    }

    #[test]
    fn code_counts_and_comments_do_not() {
        assert_eq!(severity(&"f();\n".repeat(900)), None);
        assert_eq!(severity(&"f();\n".repeat(901)), Some(Severity::Error));
        assert_eq!(severity(&"// why\n\n".repeat(901)), None);
    }
}
