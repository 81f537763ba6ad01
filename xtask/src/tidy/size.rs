//! Files stay small enough to be read in one sitting.

use super::Finding;
use super::files::File;

const MAX_LINES: usize = 900;
const MAX_CODE_LINES: usize = 600;

/// `code` is the file with its comments masked.
pub(crate) fn check(file: &File, code: &str) -> Option<Finding> {
    let lines = file.text.lines().count();
    let code_lines = code.lines().filter(|line| !line.trim().is_empty()).count();
    if lines > MAX_LINES {
        let message = format!("{lines} lines, at most {MAX_LINES}; split it by what its parts are about");
        return Some(Finding::error(&file.path, 0, message));
    }
    if code_lines > MAX_CODE_LINES {
        let message = format!("{code_lines} lines of code; over {MAX_CODE_LINES} it should be split");
        return Some(Finding::warning(&file.path, 0, message));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::{Severity, rust_source};

    fn severity(text: &str) -> Option<Severity> {
        check(&File::new("a.rs", text), &rust_source::mask(text)).map(|finding| finding.severity)
    }

    #[test]
    fn comments_count_only_for_the_hard_limit() {
        assert_eq!(severity(&"f();\n".repeat(600)), None);
        assert_eq!(severity(&"f();\n".repeat(601)), Some(Severity::Warning));
        assert_eq!(severity(&"// why\n".repeat(900)), None);
        assert_eq!(severity(&"// why\n".repeat(901)), Some(Severity::Error));
    }
}
