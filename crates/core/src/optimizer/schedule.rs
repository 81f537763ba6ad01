//! Learning-rate schedules, as factors of the learning rate.

use crate::spec::{Spec, SpecError};
use serde::Deserialize;
use std::fmt;

/// How the learning rate falls with a table's version.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Schedule {
    /// `constant`: it does not.
    Constant,
    /// `step(every=30,factor=0.1)`: multiplied by `factor` every so many versions.
    Step {
        /// Versions between two drops, at least 1.
        every: u64,
        /// Factor of a drop, above 0 and at most 1.
        factor: f64,
    },
    /// `cosine(total=1000,floor=0)`: half a cosine wave down, then flat.
    Cosine {
        /// The version at which it ends, at least 1.
        total: u64,
        /// The part of the learning rate that is left at the end, from 0 to 1.
        floor: f64,
    },
    /// `invsqrt`: `1 / sqrt(t + 1)`, for which the regret bounds of SSP and PSSP hold.
    InvSqrt,
}

impl Schedule {
    /// Reads `name` or `name(key=value,...)`.
    pub fn parse(text: &str) -> Result<Schedule, SpecError> {
        let mut spec = call(text)?;
        // Messages appear where an optimizer was being read; `step` alone would not say what it is.
        let name = std::mem::take(&mut spec.name);
        spec.name = format!("schedule {name}");
        match name.as_str() {
            "constant" => spec.config().map(|NoParams {}| Schedule::Constant),
            "step" => {
                let StepParams { every, factor } = spec.config()?;
                spec.require(every >= 1, || format!("every = {every}: expected every >= 1"))?;
                spec.require(factor > 0.0 && factor <= 1.0, || {
                    format!("factor = {factor}: expected 0 < factor <= 1")
                })?;
                Ok(Schedule::Step { every, factor })
            }
            "cosine" => {
                let CosineParams { total, floor } = spec.config()?;
                spec.require(total >= 1, || format!("total = {total}: expected total >= 1"))?;
                spec.require((0.0..=1.0).contains(&floor), || {
                    format!(
                        "floor = {floor}: expected 0 <= floor <= 1, the part of lr that is left at the end"
                    )
                })?;
                Ok(Schedule::Cosine { total, floor })
            }
            "invsqrt" => spec.config().map(|NoParams {}| Schedule::InvSqrt),
            _ => Err(SpecError::Unknown {
                axis: "schedule",
                name,
                known: "constant, step(every=30,factor=0.1), cosine(total=1000,floor=0), invsqrt".into(),
            }),
        }
    }

    /// Factor of the learning rate at `version`; 1 at version 0.
    pub fn factor(&self, version: u64) -> f64 {
        match *self {
            Schedule::Constant => 1.0,
            Schedule::Step { every, factor } => power(factor, version / every),
            Schedule::Cosine { total, floor } => {
                let done = version.min(total) as f64 / total as f64;
                floor + (1.0 - floor) * 0.5 * (1.0 + (std::f64::consts::PI * done).cos())
            }
            Schedule::InvSqrt => 1.0 / (version as f64 + 1.0).sqrt(),
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Schedule::Constant => write!(f, "constant"),
            Schedule::Step { every, factor } => write!(f, "step(every={every},factor={factor})"),
            Schedule::Cosine { total, floor } => write!(f, "cosine(total={total},floor={floor})"),
            Schedule::InvSqrt => write!(f, "invsqrt"),
        }
    }
}

/// `base` to a whole power by repeated squaring: the standard library's `powi` may round differently elsewhere.
pub(super) fn power(base: f64, exponent: u64) -> f64 {
    let (mut result, mut square, mut bits) = (1.0, base, exponent);
    while bits > 0 {
        if bits & 1 == 1 {
            result *= square;
        }
        square *= square;
        bits >>= 1;
    }
    result
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NoParams {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct StepParams {
    every: u64,
    factor: f64,
}

impl Default for StepParams {
    fn default() -> StepParams {
        StepParams { every: 30, factor: 0.1 }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct CosineParams {
    total: u64,
    floor: f64,
}

impl Default for CosineParams {
    fn default() -> CosineParams {
        CosineParams { total: 1000, floor: 0.0 }
    }
}

/// `name(a=1,b=2)` as the spec `name:a=1,b=2`: inside another component's parameters a colon would read badly.
fn call(text: &str) -> Result<Spec, SpecError> {
    let syntax = |why: &str| SpecError::Syntax { text: text.to_owned(), why: why.to_owned() };
    match text.trim().split_once('(') {
        None if text.contains(':') => Err(syntax("a schedule's parameters stand in parentheses")),
        None => Spec::parse(text),
        Some((name, rest)) => {
            let inner = rest.strip_suffix(')').ok_or_else(|| syntax("`)` is expected at the end"))?;
            Spec::parse(&format!("{name}:{inner}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_prints_the_same_text() {
        for text in ["constant", "step(every=30,factor=0.1)", "cosine(total=1000,floor=0)", "invsqrt"] {
            assert_eq!(Schedule::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Schedule::parse("step").unwrap(), Schedule::Step { every: 30, factor: 0.1 });
        assert_eq!(
            Schedule::parse(" cosine( floor = 0.5 ) ").unwrap().to_string(),
            "cosine(total=1000,floor=0.5)"
        );
    }

    #[test]
    fn wrong_text_is_an_error_that_says_what_was_expected() {
        for (text, expected) in [
            ("linear", "unknown schedule `linear`; known: constant, step(every=30,factor=0.1), cosine"),
            ("", "a component name is expected first"),
            ("step(every=3", "`)` is expected at the end"),
            ("step:every=3", "parameters stand in parentheses"),
            ("step(every=0)", "schedule step: every = 0: expected every >= 1"),
            ("step(factor=1.5)", "schedule step: factor = 1.5: expected 0 < factor <= 1"),
            ("step(rate=3)", "unknown field `rate`, expected `every` or `factor`"),
            ("cosine(total=0)", "schedule cosine: total = 0: expected total >= 1"),
            ("cosine(floor=2)", "schedule cosine: floor = 2: expected 0 <= floor <= 1"),
            ("cosine(total=many)", "`many`: expected a whole number"),
            ("invsqrt(t=1)", "schedule invsqrt: unknown field `t`"),
        ] {
            let error = Schedule::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn known_answers() {
        let factor = |text: &str, version| Schedule::parse(text).unwrap().factor(version);
        assert_eq!(factor("constant", u64::MAX), 1.0);
        assert_eq!([0, 29, 30, 60].map(|v| factor("step(factor=0.5)", v)), [1.0, 1.0, 0.5, 0.25]);
        assert_eq!(factor("step", u64::MAX), 0.0);
        assert_eq!([0, 3, 99].map(|v| factor("invsqrt", v)), [1.0, 0.5, 0.1]);
        let cosine = [0, 50, 100, 1000].map(|v| factor("cosine(total=100,floor=0.2)", v));
        for (given, expected) in cosine.into_iter().zip([1.0, 0.6, 0.2, 0.2]) {
            assert!((given - expected).abs() < 1e-12, "{given} {expected}");
        }
    }

    #[test]
    fn power_is_repeated_multiplication() {
        assert_eq!(power(0.5, 10), 1.0 / 1024.0);
        assert_eq!(power(3.0, 5), 243.0);
        assert_eq!(power(0.0, 0), 1.0);
        assert!((power(0.999, 1234) - 0.999f64.powf(1234.0)).abs() < 1e-12);
    }
}
