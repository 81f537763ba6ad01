//! A condition of the user's own as a function of the application, which worker 0 evaluates for all servers.
//!
//! The model itself is the fallback: what it says holds where worker 0 does not answer. The controller asks.

use super::psp::seconds;
use super::{Apply, Close, Consistency, Decision, PullView, SyncState, axis};
use crate::limits;
use crate::prng::Prng;
use crate::registry::{Entry, Param};
use crate::spec::{Spec, SpecError};
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;

pub(super) const ENTRY: Entry<dyn Consistency> = Entry {
    name: "remote",
    about: "A condition that is a function of the application: worker 0 says of each pull whether it is answered or waits, and is asked again whenever a worker has pushed; every gradient is a step at once.",
    params: &[
        Param { name: "name", default: None, about: "The name that worker 0 gave the condition." },
        Param {
            name: "deadline",
            default: Some("100ms"),
            about: "How long a server waits for worker 0's word on a pull; above 0, at most 3600 seconds.",
        },
        Param {
            name: "fallback",
            default: Some("ssp:s=3"),
            about: "The model that decides where worker 0 gives no answer: not in time, because the condition failed, or because it is gone. Its push condition, if it has one, closes rounds whoever judges pulls. In parentheses where it has commas.",
        },
        Param {
            name: "significance",
            default: Some("false"),
            about: "Whether pushes are measured, so that the condition sees |g|/|w| of the puller's last one.",
        },
    ],
    example: "remote:name=near",
    build,
};

const DEADLINE: &str = "100ms";
const FALLBACK: &str = "ssp:s=3";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    name: String,
    deadline: Option<String>,
    fallback: Option<String>,
    #[serde(default)]
    significance: bool,
}

/// A condition that somebody outside of the server evaluates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    /// Its name.
    pub name: Arc<str>,
    /// How long an answer is waited for.
    pub deadline: Duration,
}

#[derive(Debug)]
struct RemoteCondition {
    remote: Remote,
    fallback: Box<dyn Consistency>,
    significance: bool,
}

fn build(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    let spec = spec.with_positional("name")?;
    let Config { name, deadline, fallback, significance } = spec.config()?;
    check_name(&name).map_err(|why| spec.parameter_error(&why))?;
    let text = deadline.as_deref().unwrap_or(DEADLINE);
    let deadline = seconds(&spec, "deadline", text)?;
    spec.require(!deadline.is_zero(), || format!("deadline = {text}: expected more than 0"))?;
    let fallback = build_fallback(&spec, fallback.as_deref().unwrap_or(FALLBACK))?;
    let remote = Remote { name: name.into(), deadline };
    Ok(Box::new(RemoteCondition { remote, fallback, significance }))
}

/// Whether a condition can have this name; the error says why not.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_fine = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-' || c == '.';
    if name.len() <= limits::MAX_NAME_BYTES && name.chars().all(is_fine) && !name.is_empty() {
        return Ok(());
    }
    Err(format!(
        "name = {name}: expected at most {} letters, digits, `_`, `-` and `.`",
        limits::MAX_NAME_BYTES
    ))
}

/// The fallback, whose gradients must become steps as the condition's do.
fn build_fallback(spec: &Spec, text: &str) -> Result<Box<dyn Consistency>, SpecError> {
    let inner = text.strip_prefix('(').and_then(|text| text.strip_suffix(')')).unwrap_or(text);
    let fallback = axis().build(&Spec::parse(inner)?)?;
    spec.require(fallback.apply() == Apply::OnArrival && fallback.remote().is_none(), || {
        format!("fallback = {text}: expected asp, ssp, dsps, pssp or when, with steps on arrival")
    })?;
    Ok(fallback)
}

impl Consistency for RemoteCondition {
    fn pull(&self, state: &SyncState, pull: &PullView, rng: &mut Prng) -> Decision {
        self.fallback.pull(state, pull, rng)
    }

    fn closes(&self, state: &SyncState) -> Close {
        self.fallback.closes(state)
    }

    fn soft_bound(&self, state: &SyncState) -> Option<u64> {
        self.fallback.soft_bound(state)
    }

    fn wants_significance(&self) -> bool {
        self.significance || self.fallback.wants_significance()
    }

    fn observe(&mut self, state: &SyncState) {
        self.fallback.observe(state);
    }

    fn memory(&self) -> Vec<u8> {
        self.fallback.memory()
    }

    fn recall(&mut self, memory: &[u8]) -> Result<(), String> {
        self.fallback.recall(memory)
    }

    fn remote(&self) -> Option<&Remote> {
        Some(&self.remote)
    }
}

#[cfg(test)]
mod tests {
    use crate::consistency::{SyncPolicy, axis};
    use std::time::Duration;

    #[test]
    fn name_deadline_and_fallback_are_read() {
        for (text, name, deadline_ms) in [
            ("remote:near", "near", 100),
            ("remote:name=near,deadline=0.5", "near", 500),
            ("remote:near,fallback=(pssp:s=3,c=0.5),deadline=20ms", "near", 20),
            ("remote:near,fallback=when:pull=gap < 2", "near", 100),
        ] {
            let model = SyncPolicy::parse(&axis(), text).unwrap().model;
            let remote = model.remote().unwrap();
            assert_eq!(
                (&*remote.name, remote.deadline),
                (name, Duration::from_millis(deadline_ms)),
                "{text}"
            );
        }
        let wants = |text| SyncPolicy::parse(&axis(), text).unwrap().model.wants_significance();
        assert!(wants("remote:near,significance=true") && !wants("remote:near"));
        assert!(wants("remote:near,fallback=when:pull=significance < 1"));
    }

    #[test]
    fn a_fallback_makes_the_same_steps_and_asks_nobody() {
        for (text, expected) in [
            ("remote", "missing field `name`"),
            ("remote:name=a b", "expected at most"),
            ("remote:near,deadline=0", "expected more than 0"),
            ("remote:near,deadline=soon", "expected 0 to 3600 seconds"),
            (
                "remote:near,fallback=bsp",
                "fallback = bsp: expected asp, ssp, dsps, pssp or when, with steps on arrival",
            ),
            (
                "remote:near,fallback=remote:far",
                "expected asp, ssp, dsps, pssp or when, with steps on arrival",
            ),
            ("remote:near,fallback=ssp", "missing field `s`"),
            ("remote:near,fallback=sps", "unknown consistency model `sps`"),
        ] {
            let error = SyncPolicy::parse(&axis(), text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
