//! How rules are read and printed.

use super::{Effect, FaultError, Rule, Selector};
use crate::types::{ServerId, Time, WorkerId};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

const SELECTORS: &str = "worker=N, worker=*, server=N, server=*, coordinator, pull, push, link";
const EFFECTS: &str = "slow=4x, pause=2s@10s, stall@5s, crash@5s[,restart=2s], delay=4s[,p=0.01], reset[,p=0.01], trace=PATH[,scale=1]";
/// No fault lasts longer than this many seconds; it keeps every sum of times far from overflow.
const MAX_SECONDS: f64 = 1e7;

impl FromStr for Rule {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Rule, FaultError> {
        let trimmed = text.trim();
        let rule = if trimmed.starts_with("trace=") {
            effect(trimmed).map(|effect| Rule { selector: Selector::Worker(None), effect })
        } else {
            rule(trimmed)
        };
        let rule = rule.and_then(check);
        rule.map_err(|why| FaultError::Rule { text: text.to_owned(), why })
    }
}

fn rule(text: &str) -> Result<Rule, String> {
    let Some((selector_text, effect_text)) = text.split_once(':') else {
        return Err(format!("expected SELECTOR:EFFECT; selectors: {SELECTORS}; effects: {EFFECTS}"));
    };
    Ok(Rule { selector: selector(selector_text.trim())?, effect: effect(effect_text.trim())? })
}

fn selector(text: &str) -> Result<Selector, String> {
    let unknown = || format!("unknown selector `{text}`; known: {SELECTORS}");
    let which = |number: &str| match number {
        "*" => Ok(None),
        _ => number.parse::<u32>().map(Some).map_err(|_| unknown()),
    };
    match text.split_once('=') {
        Some(("worker", number)) => Ok(Selector::Worker(which(number)?.map(WorkerId))),
        Some(("server", number)) => Ok(Selector::Server(which(number)?.map(ServerId))),
        None if text == "coordinator" => Ok(Selector::Coordinator),
        None if text == "pull" => Ok(Selector::Pull),
        None if text == "push" => Ok(Selector::Push),
        None if text == "link" => Ok(Selector::Link),
        _ => Err(unknown()),
    }
}

fn effect(text: &str) -> Result<Effect, String> {
    let mut parts = text.split(',').map(str::trim);
    let head = parts.next().unwrap_or_default();
    let options = parts.collect::<Vec<_>>();
    let no_options = |effect: Effect| match options.first() {
        None => Ok(effect),
        Some(extra) => Err(format!("`{extra}` does not belong to this effect; effects: {EFFECTS}")),
    };
    if let Some(at) = head.strip_prefix("crash@") {
        let at = Time::ZERO + duration(at)?;
        let restart = match options.first().map(|option| option.strip_prefix("restart=")) {
            Some(Some(after)) if options.len() == 1 => Some(duration(after)?),
            None => None,
            Some(_) => return no_options(Effect::Crash { at, restart: None }),
        };
        return Ok(Effect::Crash { at, restart });
    }
    if let Some(at) = head.strip_prefix("stall@") {
        return no_options(Effect::Stall { at: Time::ZERO + duration(at)? });
    }
    match head.split_once('=') {
        None if head == "reset" => Ok(Effect::Reset { p: probability(&options)? }),
        Some(("slow", factor)) => no_options(Effect::Slow(slow_factor(factor)?)),
        Some(("pause", when)) => {
            let Some((length, at)) = when.split_once('@') else {
                return Err(format!("`pause={when}`: expected a length and a time, as in pause=2s@10s"));
            };
            no_options(Effect::Pause { length: duration(length)?, at: Time::ZERO + duration(at)? })
        }
        Some(("delay", by)) => Ok(Effect::Delay { by: duration(by)?, p: probability(&options)? }),
        Some(("trace", "")) => Err("`trace=`: expected the path of a file".into()),
        Some(("trace", path)) => {
            let scale = number_option(&options, "scale", "a number above 0 and at most 1e6", |scale| {
                scale > 0.0 && scale <= 1e6
            })?;
            Ok(Effect::Trace { path: path.to_owned(), scale })
        }
        _ => Err(format!("unknown effect `{head}`; known: {EFFECTS}")),
    }
}

/// Refuses effects that the selector cannot have.
fn check(rule: Rule) -> Result<Rule, String> {
    let is_worker = matches!(rule.selector, Selector::Worker(_));
    let is_node = is_worker || matches!(rule.selector, Selector::Server(_) | Selector::Coordinator);
    let (allowed, needs) = match rule.effect {
        Effect::Slow(_) => (is_node, "slow needs worker=N or server=N before it"),
        Effect::Pause { .. } => (is_node, "pause needs worker=N or server=N before it"),
        Effect::Crash { .. } => (is_node, "crash needs worker=N or server=N before it"),
        Effect::Stall { .. } => (is_worker, "stall needs worker=N before it"),
        Effect::Trace { .. } => (is_worker, "trace needs worker=N before it"),
        Effect::Delay { .. } | Effect::Reset { .. } => (true, ""),
    };
    if allowed { Ok(rule) } else { Err(needs.to_owned()) }
}

fn slow_factor(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('x').and_then(|number| number.parse::<f64>().ok());
    match number {
        Some(factor) if (1.0..=1e6).contains(&factor) => Ok(factor),
        _ => Err(format!("`slow={text}`: expected a factor of at least 1, as in slow=4x")),
    }
}

fn probability(options: &[&str]) -> Result<f64, String> {
    number_option(options, "p", "a probability above 0 and at most 1", |p| p > 0.0 && p <= 1.0)
}

/// The one option an effect takes; 1 when it is not given.
fn number_option(
    options: &[&str],
    key: &str,
    expected: &str,
    holds: impl Fn(f64) -> bool,
) -> Result<f64, String> {
    let [option] = options else {
        return match options {
            [] => Ok(1.0),
            _ => Err(format!("expected only `{key}=` after the effect")),
        };
    };
    let number = match option.split_once('=') {
        Some((name, value)) if name.trim() == key => value.trim().parse::<f64>().ok(),
        _ => return Err(format!("`{option}`: expected `{key}=`")),
    };
    number.filter(|&number| holds(number)).ok_or_else(|| format!("`{option}`: expected {expected}"))
}

fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}`: expected a time such as 4s, 1.5s, 20ms or 500us");
    // Longer units first: `20ms` also ends in `s`.
    let units = [("ms", 1e-3), ("us", 1e-6), ("s", 1.0)];
    let (number, unit) =
        units.iter().find_map(|&(name, unit)| Some((text.strip_suffix(name)?, unit))).ok_or_else(wrong)?;
    let seconds = number.trim().parse::<f64>().map_err(|_| wrong())? * unit;
    if !(0.0..=MAX_SECONDS).contains(&seconds) {
        return Err(wrong());
    }
    // Rounded to a nanosecond, so that what is printed reads back the same.
    Ok(Duration::from_nanos((seconds * 1e9).round() as u64))
}

/// Prints a duration as [`duration`] reads it.
struct Words(Duration);

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos() as f64;
        match self.0.as_nanos() {
            n if n % 1_000_000_000 == 0 => write!(f, "{}s", n / 1_000_000_000),
            n if n < 1_000_000 => write!(f, "{}us", nanos / 1e3),
            n if n < 1_000_000_000 => write!(f, "{}ms", nanos / 1e6),
            _ => write!(f, "{}s", nanos / 1e9),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.selector, self.effect)
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Selector::Worker(Some(worker)) => write!(f, "worker={}", worker.0),
            Selector::Worker(None) => write!(f, "worker=*"),
            Selector::Server(Some(server)) => write!(f, "server={}", server.0),
            Selector::Server(None) => write!(f, "server=*"),
            Selector::Coordinator => write!(f, "coordinator"),
            Selector::Pull => write!(f, "pull"),
            Selector::Push => write!(f, "push"),
            Selector::Link => write!(f, "link"),
        }
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since_zero = |at: &Time| Words(at.since(Time::ZERO));
        let option = |f: &mut fmt::Formatter<'_>, key: &str, value: f64| {
            if value == 1.0 { Ok(()) } else { write!(f, ",{key}={value}") }
        };
        match self {
            Effect::Slow(factor) => write!(f, "slow={factor}x"),
            Effect::Pause { length, at } => write!(f, "pause={}@{}", Words(*length), since_zero(at)),
            Effect::Stall { at } => write!(f, "stall@{}", since_zero(at)),
            Effect::Crash { at, restart } => {
                write!(f, "crash@{}", since_zero(at))?;
                restart.map_or(Ok(()), |after| write!(f, ",restart={}", Words(after)))
            }
            Effect::Delay { by, p } => {
                write!(f, "delay={}", Words(*by))?;
                option(f, "p", *p)
            }
            Effect::Reset { p } => {
                write!(f, "reset")?;
                option(f, "p", *p)
            }
            Effect::Trace { path, scale } => {
                write!(f, "trace={path}")?;
                option(f, "scale", *scale)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_and_prints_the_same_words() {
        for text in [
            "worker=2:slow=4x",
            "worker=*:slow=1.5x",
            "pull:delay=4s,p=0.0016",
            "push:delay=500us",
            "server=1:pause=2s@10s",
            "server=*:pause=1.5s@20ms",
            "worker=1:crash@5s",
            "worker=2:stall@1.5s",
            "worker=1:crash@5s,restart=20ms",
            "link:reset,p=0.001",
            "worker=0:reset",
            "worker=*:trace=steps.csv,scale=0.5",
        ] {
            assert_eq!(text.parse::<Rule>().unwrap().to_string(), text);
        }
        assert_eq!("trace=a.csv".parse::<Rule>().unwrap().to_string(), "worker=*:trace=a.csv");
    }

    #[test]
    fn wrong_words_are_answered_with_what_was_expected() {
        for (text, expected) in [
            ("", "expected SELECTOR:EFFECT"),
            ("worker=2", "effects: slow=4x"),
            ("wroker=2:slow=4x", "unknown selector `wroker=2`; known: worker=N"),
            ("worker=two:slow=4x", "unknown selector"),
            ("worker=-1:slow=4x", "unknown selector"),
            ("worker=2:slow=4", "a factor of at least 1"),
            ("worker=2:slow=0.5x", "a factor of at least 1"),
            ("worker=2:slow=nanx", "a factor of at least 1"),
            ("pull:slow=2x", "slow needs worker=N or server=N"),
            ("link:crash@5s", "crash needs"),
            ("server=1:stall@5s", "stall needs worker=N"),
            ("worker=1:stall@5s,p=0.1", "does not belong"),
            ("worker=1:crash@5s,restart=soon", "expected a time"),
            ("worker=1:crash@5s,restart=1s,restart=2s", "does not belong"),
            ("worker=1:crash@5s,p=0.1", "does not belong"),
            ("server=0:trace=x.csv", "trace needs worker=N"),
            ("worker=2:sleep=4s", "unknown effect `sleep=4s`; known: slow=4x"),
            ("server=1:pause=2s", "as in pause=2s@10s"),
            ("server=1:pause=2@10s", "`2`: expected a time such as 4s"),
            ("server=1:pause=2s@10s,p=0.1", "does not belong"),
            ("pull:delay=-4s", "expected a time"),
            ("pull:delay=1e300s", "expected a time"),
            ("pull:delay=nans", "expected a time"),
            ("pull:delay=4s,p=0", "a probability above 0 and at most 1"),
            ("pull:delay=4s,p=2", "a probability above 0 and at most 1"),
            ("pull:delay=4s,q=0.1", "expected `p=`"),
            ("pull:delay=4s,p=0.1,p=0.2", "expected only `p=`"),
            ("worker=0:trace=", "the path of a file"),
            ("worker=0:trace=x,scale=0", "a number above 0"),
        ] {
            let error = text.parse::<Rule>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_reads_or_fails_cleanly(text in "\\PC{0,40}") {
            if let Ok(rule) = text.parse::<Rule>() {
                prop_assert_eq!(rule.to_string().parse::<Rule>(), Ok(rule));
            }
        }

        #[test]
        fn every_duration_prints_as_it_reads(nanos in 0u64..4_000_000_000_000) {
            let length = Duration::from_nanos(nanos);
            prop_assert_eq!(duration(&Words(length).to_string()), Ok(length));
        }
    }
}
