//! Durations as people write them: `500ms`, `30s`, `2m`, `1h`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A duration with a text form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Span(pub(crate) Duration);

/// The units, longest first; printing takes the longest that leaves a whole number.
const UNITS: [(&str, u64); 4] = [("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Span, String> {
        let wrong = || format!("`{text}`: expected a duration such as `500ms`, `30s`, `2m` or `1h`");
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let (number, unit) = text.split_at(digits);
        let number: f64 = number.parse().map_err(|_| wrong())?;
        let (_, milliseconds) = UNITS.iter().find(|(name, _)| *name == unit.trim()).ok_or_else(wrong)?;
        Duration::try_from_secs_f64(number * *milliseconds as f64 / 1e3).map(Span).map_err(|_| wrong())
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.0.as_millis();
        let fits = |milliseconds: u64| {
            total >= u128::from(milliseconds) && total.is_multiple_of(u128::from(milliseconds))
        };
        match UNITS.iter().find(|(_, milliseconds)| fits(*milliseconds)) {
            Some((unit, milliseconds)) => write!(f, "{}{unit}", total / u128::from(*milliseconds)),
            None => write!(f, "0s"),
        }
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Span, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_reads_back() {
        for (text, milliseconds, printed) in [
            ("500ms", 500, "500ms"),
            ("30s", 30_000, "30s"),
            ("90s", 90_000, "90s"),
            ("120s", 120_000, "2m"),
            ("1.5s", 1500, "1500ms"),
            ("1h", 3_600_000, "1h"),
            ("0s", 0, "0s"),
        ] {
            let span: Span = text.parse().unwrap();
            assert_eq!(span.0, Duration::from_millis(milliseconds), "{text}");
            assert_eq!(span.to_string(), printed);
            assert_eq!(printed.parse::<Span>().unwrap(), span);
        }
    }

    #[test]
    fn other_text_is_refused_with_examples() {
        for text in ["", "5", "s", "5 parsecs", "-1s", "1.2.3s", "99999999999999999999999h"] {
            assert!(text.parse::<Span>().unwrap_err().contains("such as"), "{text}");
        }
    }
}
