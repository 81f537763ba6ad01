//! A type lives in one file: its inherent methods stand where it is defined, so that its fields can be private.

use super::Finding;
use super::files::File;

const CORE: &str = "crates/core/";

/// `code` is the file with its comments and strings masked. The rule is core's; elsewhere, where drivers talk to systems, it is
/// a warning.
pub(crate) fn check(file: &File, code: &str) -> Vec<Finding> {
    let elsewhere = |(line, name): &(usize, String)| {
        let message = format!("`impl {name}` without its type; a type and its methods are in one file");
        match file.path.starts_with(CORE) {
            true => Finding::error(&file.path, *line, message),
            false => Finding::warning(&file.path, *line, message),
        }
    };
    inherent_impls(code).iter().filter(|(_, name)| !defines(code, name)).map(elsewhere).collect()
}

/// The types that a file has inherent methods of, each with its line. Only what stands at the left edge is looked at: tests and
/// functions may do as they like.
fn inherent_impls(code: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut start = 0;
    for (number, line) in code.lines().enumerate() {
        if let Some(rest) = line.strip_prefix("impl").filter(|rest| rest.starts_with([' ', '<'])) {
            // It may go on over several lines, up to its body.
            let head = &code[start + line.len() - rest.len()..];
            let head = head.split('{').next().unwrap_or_default();
            found.extend(name_of(head).map(|name| (number + 1, name)));
        }
        start += line.len() + 1;
    }
    found
}

/// The type in `<T: Copy> path::Type<T> where ..`; nothing for the methods of a trait.
fn name_of(head: &str) -> Option<String> {
    let head = without_generics(head.trim_start());
    if head.split_whitespace().any(|word| word == "for") || head.trim_start().starts_with("dyn ") {
        return None;
    }
    let path = head.trim().split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).next()?;
    path.rsplit("::").next().filter(|name| !name.is_empty()).map(str::to_owned)
}

/// What follows the parameters in angle brackets, if there are some.
fn without_generics(head: &str) -> &str {
    if !head.starts_with('<') {
        return head;
    }
    let mut depth = 0;
    let mut before = ' ';
    for (at, c) in head.char_indices() {
        match c {
            '<' => depth += 1,
            // Of an arrow.
            '>' if before == '-' => {}
            '>' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &head[at + 1..];
        }
        before = c;
    }
    head
}

fn defines(code: &str, name: &str) -> bool {
    let is_definition = |line: &str| {
        let mut words =
            line.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
        let kind = words.find(|word| ["struct", "enum", "union"].contains(word));
        !line.starts_with(' ') && kind.is_some() && words.next() == Some(name)
    };
    code.lines().any(is_definition)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::Severity;

    fn lines(text: &str) -> Vec<usize> {
        check(&File::new("a.rs", text), text).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn methods_stand_where_their_type_is() {
        assert_eq!(lines("pub(crate) struct A;\nimpl A {\n}\nimpl<T> A {}\n"), [0; 0]);
        assert_eq!(lines("struct Ab;\nimpl A {\n}\n"), [2]);
        assert_eq!(lines("impl<'a, T: Fn(u8) -> u8>\n    super::B<'a, T>\n{\n}\n"), [1]);
        assert_eq!(lines("pub enum B<T> { X(T) }\nimpl<T: Copy> B<T>\nwhere\n    T: Clone,\n{}\n"), [0; 0]);
    }

    #[test]
    fn core_is_refused_what_others_are_warned_of() {
        let text = "impl A {}\n";
        let severity = |path| check(&File::new(path, text), text)[0].severity;
        assert_eq!(severity("crates/core/src/a.rs"), Severity::Error);
        assert_eq!(severity("crates/node/src/a.rs"), Severity::Warning);
    }

    #[test]
    fn methods_of_traits_may_stand_anywhere() {
        assert_eq!(lines("impl Display for A {}\nimpl<T> From<T> for A<T> {}\nimpl dyn Role {}\n"), [0; 0]);
        assert_eq!(lines("mod tests {\n    impl A {}\n}\nimplement!();\n"), [0; 0]);
    }
}
