//! Reads SPDX licence expressions: enough to say whether a set of accepted licences satisfies one.

/// Whether somebody who accepts only `allowed` may use something under `expression`.
///
/// `OR` offers a choice, `AND` demands both and binds tighter; the old `MIT/Apache-2.0` means `OR`.
pub(crate) fn satisfied(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut parser = Parser { tokens: &tokens, allowed };
    let holds = parser.any();
    // What is left over could not be read, and what cannot be read is not accepted.
    holds && parser.tokens.is_empty()
}

struct Parser<'a> {
    tokens: &'a [&'a str],
    allowed: &'a [String],
}

impl Parser<'_> {
    fn any(&mut self) -> bool {
        let mut holds = self.all();
        while self.take("OR") {
            holds |= self.all();
        }
        holds
    }

    fn all(&mut self) -> bool {
        let mut holds = self.one();
        while self.take("AND") {
            holds &= self.one();
        }
        holds
    }

    fn one(&mut self) -> bool {
        if self.take("(") {
            let holds = self.any();
            return self.take(")") && holds;
        }
        let Some((first, rest)) = self.tokens.split_first() else { return false };
        self.tokens = rest;
        let name = match rest {
            ["WITH", exception, rest @ ..] => {
                self.tokens = rest;
                format!("{first} WITH {exception}")
            }
            _ => (*first).to_owned(),
        };
        self.allowed.contains(&name)
    }

    fn take(&mut self, token: &str) -> bool {
        match self.tokens.split_first() {
            Some((first, rest)) if *first == token => {
                self.tokens = rest;
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions() {
        let allowed = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned);
        for (expression, expected) in [
            ("MIT", true),
            ("MIT OR GPL-3.0", true),
            ("MIT/Apache-2.0", true),
            ("MIT AND GPL-3.0", false),
            ("GPL-3.0 OR MIT AND Apache-2.0", true),
            ("(MIT OR GPL-3.0) AND Apache-2.0", true),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", false),
            ("Apache-2.0 WITH LLVM-exception OR GPL-3.0", true),
            ("GPL-2.0 WITH Classpath-exception-2.0", false),
            ("", false),
            ("MIT MIT", false),
            ("(MIT", false),
        ] {
            assert_eq!(satisfied(expression, &allowed), expected, "{expression}");
        }
    }
}
