//! The text form of components: `ssp:s=3`, `psp:c=28,b=0.9`, `topk:0.01+f16+lz4`.
//!
//! A spec is a name, then `:`, then parameters separated by commas. A parameter without `=` is positional.
//! Commas inside parentheses do not separate, so `sgd:lr=0.1,schedule=step(every=30,factor=0.1)` has two
//! parameters. A component's config struct is an ordinary `serde` struct with `deny_unknown_fields`.

use serde::de::value::{Error as DeError, MapDeserializer};
use serde::de::{DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use std::fmt;

/// A parsed text form, not yet matched with a component.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// The component's name.
    pub name: String,
    /// Parameters in the order they were written; a positional one has the empty key.
    pub params: Vec<(String, String)>,
}

/// Why a text form could not be turned into a component. Nothing was changed by any of these.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// The text is not of the form `name:key=value,...`.
    #[error("cannot read `{text}`: {why}")]
    Syntax {
        /// The text that was given.
        text: String,
        /// The error.
        why: String,
    },
    /// No component has this name.
    #[error("unknown {axis} `{name}`; known: {known}")]
    Unknown {
        /// The axis that was searched.
        axis: &'static str,
        /// The name that was given.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// The component exists, a parameter does not fit.
    #[error("{component}: {why}")]
    Parameter {
        /// The component's name.
        component: String,
        /// The value that does not fit, with the range or the choices.
        why: String,
    },
}

impl SpecError {
    /// The same with a text form that works, where a parameter is missing.
    pub(crate) fn with_example(self, example: &str) -> SpecError {
        match self {
            SpecError::Parameter { component, why }
                if why.starts_with("missing field") && !why.contains("such as") =>
            {
                SpecError::Parameter { component, why: format!("{why}, such as in `{example}`") }
            }
            other => other,
        }
    }
}

impl Spec {
    /// Reads `name[:param[,param...]]`.
    pub fn parse(text: &str) -> Result<Spec, SpecError> {
        let syntax = |why: &str| SpecError::Syntax { text: text.to_owned(), why: why.to_owned() };
        let trimmed = text.trim();
        let (name, rest) = match trimmed.split_once(':') {
            Some((name, rest)) => (name.trim(), rest),
            None => (trimmed, ""),
        };
        if name.is_empty() {
            return Err(syntax("a component name is expected first"));
        }
        if !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-') {
            return Err(syntax("a component name has only letters, digits, `_` and `-`"));
        }
        let mut params: Vec<(String, String)> = Vec::new();
        for part in split_outside_parentheses(rest, ',').ok_or_else(|| syntax("parentheses do not match"))? {
            let part = part.trim();
            if part.is_empty() {
                if rest.trim().is_empty() {
                    continue;
                }
                return Err(syntax("an empty parameter"));
            }
            let (key, value) = match split_assignment(part) {
                Some((key, value)) => (key.trim(), value.trim()),
                None => ("", part),
            };
            if value.is_empty() {
                return Err(syntax(&format!("`{key}` has no value")));
            }
            if params.iter().any(|(known, _)| known == key) {
                return Err(syntax(&format!("`{key}` is given twice")));
            }
            params.push((key.to_owned(), value.to_owned()));
        }
        Ok(Spec { name: name.to_owned(), params })
    }

    /// Removes a parameter and returns its value; wrappers take what is theirs before the component is built.
    pub fn take(&mut self, key: &str) -> Option<String> {
        let at = self.params.iter().position(|(known, _)| known == key)?;
        Some(self.params.remove(at).1)
    }

    /// The same with a positional parameter under its name: `topk:0.01` is `topk:ratio=0.01`.
    pub fn with_positional(&self, key: &str) -> Result<Spec, SpecError> {
        let mut spec = self.clone();
        if let Some(value) = spec.take("") {
            self.require(!spec.params.iter().any(|(known, _)| known == key), || {
                format!("`{key}` is given twice")
            })?;
            spec.params.insert(0, (key.to_owned(), value));
        }
        Ok(spec)
    }

    /// Like [`Spec::take`], parsed. `expected` completes the sentence "expected ...".
    pub fn take_parsed<T: std::str::FromStr>(
        &mut self,
        key: &str,
        expected: &str,
    ) -> Result<Option<T>, SpecError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        match value.parse() {
            Ok(parsed) => Ok(Some(parsed)),
            Err(_) => Err(self.parameter_error(format!("`{key}={value}`: expected {expected}"))),
        }
    }

    /// Fills a component's config struct. Unknown and missing parameters are errors that list the known ones.
    pub fn config<T: DeserializeOwned>(&self) -> Result<T, SpecError> {
        let entries = self.params.iter().map(|(key, value)| (key.as_str(), Scalar(value)));
        T::deserialize(MapDeserializer::<_, DeError>::new(entries))
            .map_err(|error| self.parameter_error(self.name_positional(error.to_string())))
    }

    /// The same sentence, but a positional parameter is called by its value and not by the empty name that it has.
    fn name_positional(&self, sentence: String) -> String {
        match self.params.iter().find(|(key, _)| key.is_empty()) {
            Some((_, value)) => {
                sentence.replace("unknown field ``", &format!("`{value}` is given without a name"))
            }
            None => sentence,
        }
    }

    /// An error about one of this component's parameters.
    pub fn parameter_error(&self, why: impl Into<String>) -> SpecError {
        SpecError::Parameter { component: self.name.clone(), why: why.into() }
    }

    /// `Ok` when `holds`, else an error that names the component: `s = 0: expected at least 1`.
    pub fn require(&self, holds: bool, why: impl FnOnce() -> String) -> Result<(), SpecError> {
        if holds { Ok(()) } else { Err(self.parameter_error(why())) }
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        for (index, (key, value)) in self.params.iter().enumerate() {
            let separator = if index == 0 { ':' } else { ',' };
            if key.is_empty() {
                write!(f, "{separator}{value}")?;
            } else {
                write!(f, "{separator}{key}={value}")?;
            }
        }
        Ok(())
    }
}

/// Splits at `separator` outside parentheses; `None` when the parentheses do not match.
pub fn split_outside_parentheses(text: &str, separator: char) -> Option<Vec<&str>> {
    let (mut depth, mut start, mut parts) = (0u32, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.checked_sub(1)?,
            c if c == separator && depth == 0 => {
                parts.push(&text[start..at]);
                start = at + c.len_utf8();
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    (depth == 0).then_some(parts)
}

/// Splits `key=value` at an `=` that is not part of `==`, `<=`, `>=` or `!=`.
fn split_assignment(part: &str) -> Option<(&str, &str)> {
    let at = part.find('=')?;
    let key = part[..at].trim();
    let is_key = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    (is_key && !part[at + 1..].starts_with('=')).then(|| (&part[..at], &part[at + 1..]))
}

/// One value as text; it becomes what the config struct's field asks for.
struct Scalar<'a>(&'a str);

impl<'de> IntoDeserializer<'de, DeError> for Scalar<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

macro_rules! parse_as {
    ($($method:ident $visit:ident $type:ty, $expected:literal;)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DeError> {
            let value = self.0.parse::<$type>().map_err(|_| {
                <DeError as serde::de::Error>::custom(format!("`{}`: expected {}", self.0, $expected))
            })?;
            visitor.$visit(value)
        })*
    };
}

impl<'de> Deserializer<'de> for Scalar<'de> {
    type Error = DeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DeError> {
        visitor.visit_borrowed_str(self.0)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DeError> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, DeError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DeError> {
        visitor.visit_enum(self.0.into_deserializer())
    }

    parse_as! {
        deserialize_bool visit_bool bool, "true or false";
        deserialize_u8 visit_u8 u8, "a whole number from 0 to 255";
        deserialize_u16 visit_u16 u16, "a whole number of at least 0";
        deserialize_u32 visit_u32 u32, "a whole number of at least 0";
        deserialize_u64 visit_u64 u64, "a whole number of at least 0";
        deserialize_i64 visit_i64 i64, "a whole number";
        deserialize_f32 visit_f32 f32, "a number";
        deserialize_f64 visit_f64 f64, "a number";
    }

    serde::forward_to_deserialize_any! {
        i8 i16 i32 i128 u128 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map struct
        identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Deserialize, Debug, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Example {
        s: u64,
        #[serde(default)]
        c: Option<f64>,
    }

    #[test]
    fn reads_and_prints_the_same_text() {
        for text in
            ["bsp", "ssp:s=3", "psp:c=28,b=0.9", "topk:0.01", "sgd:lr=0.1,schedule=step(every=30,factor=0.1)"]
        {
            assert_eq!(Spec::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn an_expression_is_a_value() {
        let spec = Spec::parse("when:pull=progress <= v_train + 3 || rand() > 0.5,push=count == n").unwrap();
        assert_eq!(spec.params[0], ("pull".into(), "progress <= v_train + 3 || rand() > 0.5".into()));
        assert_eq!(spec.params[1], ("push".into(), "count == n".into()));
    }

    #[test]
    fn fills_a_config_struct() {
        let config: Example = Spec::parse("x:s=3,c=0.5").unwrap().config().unwrap();
        assert_eq!(config, Example { s: 3, c: Some(0.5) });
    }

    #[test]
    fn wrong_text_is_an_error_that_says_what_was_expected() {
        for (text, expected) in [
            ("", "a component name is expected"),
            (":s=3", "a component name is expected"),
            ("ssp:s=", "`s` has no value"),
            ("ssp:s=1,s=2", "given twice"),
            ("ssp:s=1,,", "an empty parameter"),
            ("sgd:schedule=step(3", "parentheses"),
        ] {
            let error = Spec::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        for (text, expected) in [
            ("x:s=three", "`three`: expected a whole number"),
            ("x:s=-1", "expected a whole number"),
            ("x:s=1,z=2", "unknown field `z`, expected `s` or `c`"),
            ("x:1/0", "`1/0` is given without a name, expected `s` or `c`"),
            ("x", "missing field `s`"),
        ] {
            let error = Spec::parse(text).unwrap().config::<Example>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
