//! Just enough of Rust's lexical structure to tell code from comments and strings.

/// The source with comments replaced by spaces and the insides of strings by underscores; lines stay where they are.
pub(crate) fn mask(source: &str) -> String {
    let mut masker = Masker { rest: source, out: String::with_capacity(source.len()) };
    while !masker.rest.is_empty() {
        masker.step();
    }
    masker.out
}

/// Whether `word` occurs in `line` with no identifier character on either side.
pub(crate) fn contains_word(line: &str, word: &str) -> bool {
    let is_identifier = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(is_identifier) && !after.is_some_and(is_identifier)
    })
}

struct Masker<'a> {
    rest: &'a str,
    out: String,
}

impl Masker<'_> {
    /// Consumes one token: a comment, a literal, an identifier, or one other character.
    fn step(&mut self) {
        let rest = self.rest;
        if rest.starts_with("//") {
            self.hide(rest.find('\n').unwrap_or(rest.len()), ' ');
        } else if rest.starts_with("/*") {
            self.hide(block_comment_length(rest), ' ');
        } else if let Some(inside) = rest.strip_prefix('"') {
            self.literal(0, "\"", string_length(inside));
        } else if let Some(hashes) = raw_string_hashes(rest) {
            let end = format!("\"{}", "#".repeat(hashes));
            let start = rest.find('"').map_or(rest.len(), |at| at + 1);
            let inside = rest[start..].find(&end).unwrap_or(rest.len() - start);
            self.literal(start - 1, &end, inside);
        } else if let Some(length) = char_length(rest) {
            self.literal(0, "'", length);
        } else {
            // An identifier is taken whole, so that the `r` of `for` never starts a raw string.
            let is_identifier = |c: char| c.is_alphanumeric() || c == '_';
            let length = rest.find(|c| !is_identifier(c)).unwrap_or(rest.len());
            let first = rest.chars().next().map_or(0, char::len_utf8);
            self.keep(length.max(first));
        }
    }

    /// A literal: `prefix` bytes and the opening quote, `inside` bytes, the closing text.
    fn literal(&mut self, prefix: usize, end: &str, inside: usize) {
        self.keep(prefix + 1);
        self.hide(inside, '_');
        if self.rest.starts_with(end) {
            self.keep(end.len());
        }
    }

    fn keep(&mut self, bytes: usize) {
        let (kept, rest) = self.rest.split_at(bytes);
        self.out.push_str(kept);
        self.rest = rest;
    }

    fn hide(&mut self, bytes: usize, by: char) {
        let (hidden, rest) = self.rest.split_at(bytes);
        self.out.extend(hidden.chars().map(|c| if c == '\n' { c } else { by }));
        self.rest = rest;
    }
}

/// Block comments nest.
fn block_comment_length(text: &str) -> usize {
    let (mut depth, mut at) = (0usize, 0);
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// Bytes up to the closing quote, escapes skipped.
fn string_length(inside: &str) -> usize {
    let mut escaped = false;
    for (at, c) in inside.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at,
            _ => {}
        }
    }
    inside.len()
}

/// The number of `#` when `text` starts a raw string: `r"`, `r#"`, `br##"`, `cr"`.
fn raw_string_hashes(text: &str) -> Option<usize> {
    let rest =
        text.strip_prefix("br").or_else(|| text.strip_prefix("cr")).or_else(|| text.strip_prefix('r'))?;
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    rest[hashes..].starts_with('"').then_some(hashes)
}

/// Bytes between the quotes when `text` starts a character literal; a lifetime has no closing quote.
fn char_length(text: &str) -> Option<usize> {
    let inside = text.strip_prefix('\'')?;
    if inside.starts_with('\\') {
        // The escaped character itself may be a quote.
        let escaped = 1 + inside.chars().nth(1)?.len_utf8();
        return inside[escaped..].find('\'').map(|at| at + escaped);
    }
    let length = inside.chars().next()?.len_utf8();
    inside[length..].starts_with('\'').then_some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_are_hidden_and_code_is_kept() {
        for (source, expected) in [
            ("a // HashMap\nb", "a           \nb"),
            ("a /* x /* y */ */ b", "a                 b"),
            ("f(\"a\\\"b\")", "f(\"____\")"),
            ("f(r#\"a\"b\"#)", "f(r#\"___\"#)"),
            ("for x in y", "for x in y"),
            ("fn f<'a>(x: &'a str)", "fn f<'a>(x: &'a str)"),
            ("['\"', '\\'', 'x']", "['_', '__', '_']"),
            ("\"open", "\"____"),
            ("'", "'"),
            ("'\\", "'\\"),
        ] {
            assert_eq!(mask(source), expected, "{source}");
        }
    }

    #[test]
    fn lines_stay_where_they_are() {
        let source = "/* one\ntwo */ three \"four\nfive\"\nsix";
        assert_eq!(mask(source).lines().count(), source.lines().count());
    }

    #[test]
    fn words_have_borders() {
        assert!(contains_word("let x: Instant = y", "Instant"));
        assert!(!contains_word("let x: Instantly = y", "Instant"));
        assert!(!contains_word("my_Instant", "Instant"));
    }
}
