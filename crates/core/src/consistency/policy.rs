//! A model together with what every model takes: how delayed pulls are executed, and overlap.

use super::{ClientSync, Consistency, PartialPull};
use crate::registry::{Axis, Param};
use crate::spec::{Spec, SpecError};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Parameters that every consistency model takes.
pub(super) const COMMON: &[Param] = &[
    Param {
        name: "exec",
        default: Some("auto"),
        about: "When a delayed pull is answered: `lazy` when the parameters hold everything up to the worker's progress, `soft` at the next advance that the model's bound allows. `auto` is `lazy`, but with a worker's cache (`cache=on`) when its copy will do with the answer.",
    },
    Param {
        name: "overlap",
        default: Some("true"),
        about: "Whether each shard answers as soon as it can; `false` puts a global barrier between push and pull, as a baseline to measure against.",
    },
];

/// When a delayed pull is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Exec {
    /// When `V_train` passes the worker's progress: with fully updated parameters.
    #[default]
    Lazy,
    /// At the next advance of `V_train`, unless the model's staleness bound would still be broken.
    Soft,
    /// When a worker's copy that lacks no more than the answer will do: it waits for nothing else, and would only lose the time in which
    /// others catch up.
    Cached,
}

/// A consistency model as a table uses it.
#[derive(Debug)]
pub struct SyncPolicy {
    /// The model.
    pub model: Box<dyn Consistency>,
    /// When delayed pulls are answered.
    pub exec: Exec,
    /// Whether shards answer independently of each other.
    pub overlap: bool,
    names_cache: bool,
    text: String,
}

impl SyncPolicy {
    /// Reads `name[:param,...]` with the parameters `exec` and `overlap` of every model, or a bare pull condition
    /// (`progress < v_train + 3 || rand() > 0.5`) as short for `when:pull=...`.
    pub fn parse(axis: &Axis<dyn Consistency>, text: &str) -> Result<SyncPolicy, SpecError> {
        let mut spec =
            if is_condition(text) { Spec::parse(&format!("when:pull={text}"))? } else { Spec::parse(text)? };
        let exec = match spec.take("exec").as_deref() {
            None | Some("auto") => None,
            Some("lazy") => Some(Exec::Lazy),
            Some("soft") => Some(Exec::Soft),
            Some(other) => {
                return Err(spec.parameter_error(format!("`exec={other}`: expected auto, lazy or soft")));
            }
        };
        let overlap = spec.take_parsed("overlap", "true or false")?.unwrap_or(true);
        let model = axis.build(&spec)?;
        let cache = spec.params.iter().find(|(name, _)| name == "cache").map(|(_, value)| value.as_str());
        let names_cache = cache.is_some();
        if !overlap && cache == Some("on") {
            let why = "`cache=on` has no effect with `overlap=false`, where every iteration waits for a barrier: leave one out";
            return Err(spec.parameter_error(why));
        }
        let is_cached = overlap && matches!(model.client_sync(), ClientSync::Cached { .. });
        let by_itself = if is_cached { Exec::Cached } else { Exec::Lazy };
        let exec = exec.unwrap_or(by_itself);
        if exec != by_itself {
            let name = if exec == Exec::Soft { "soft" } else { "lazy" };
            spec.params.push(("exec".into(), name.into()));
        }
        if !overlap {
            spec.params.push(("overlap".into(), "false".into()));
        }
        Ok(SyncPolicy { model, exec, overlap, names_cache, text: spec.to_string() })
    }

    /// The same for a table of which workers have no copies: all pulls wait for their answers.
    pub fn without_copies(self) -> SyncPolicy {
        let exec = if self.exec == Exec::Cached { Exec::Lazy } else { self.exec };
        SyncPolicy { exec, ..self }
    }

    /// The model's partial pulling, where it lets a worker go on without some of the blocks: with b = 1 it never does.
    pub fn partial_pull(&self) -> Option<PartialPull> {
        match self.model.client_sync() {
            ClientSync::Partial(partial) if partial.leaves_blocks_out() => Some(partial),
            ClientSync::Partial(_) | ClientSync::AllBlocks | ClientSync::Cached { .. } => None,
        }
    }

    /// Whether the text has the parameter `cache`, and does not leave it to its default.
    pub fn names_cache(&self) -> bool {
        self.names_cache
    }

    /// The most rounds that a worker's copy may lack where the model uses it as a cache. A barrier in every iteration leaves nothing
    /// for one to do.
    pub fn cache_bound(&self) -> Option<u64> {
        match self.model.client_sync() {
            ClientSync::Cached { bound } if self.overlap => Some(bound),
            ClientSync::Cached { .. } | ClientSync::AllBlocks | ClientSync::Partial(_) => None,
        }
    }
}

/// The canonical text form: parsing it gives an equal policy, and what is default is left out.
impl fmt::Display for SyncPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Whether the text is a condition and not a name: conditions have no `:`, names have no spaces or operators.
fn is_condition(text: &str) -> bool {
    let part_of_a_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let text = text.trim();
    !text.contains(':') && !text.chars().all(part_of_a_name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consistency::axis;

    #[test]
    fn the_text_form_is_canonical() {
        for (text, canonical, exec, overlap) in [
            ("bsp", "bsp", Exec::Lazy, true),
            (" ssp : s = 3 ", "ssp:s=3", Exec::Cached, true),
            ("ssp:s=3,exec=auto", "ssp:s=3", Exec::Cached, true),
            ("ssp:s=3,exec=lazy", "ssp:s=3,exec=lazy", Exec::Lazy, true),
            ("ssp:s=3,cache=off,exec=lazy", "ssp:s=3,cache=off", Exec::Lazy, true),
            ("ssp:s=3,overlap=false", "ssp:s=3,overlap=false", Exec::Lazy, false),
            ("ssp:exec=soft,s=3", "ssp:s=3,exec=soft", Exec::Soft, true),
            ("bsp:exec=lazy,overlap=true", "bsp", Exec::Lazy, true),
            ("bsp:overlap=false", "bsp:overlap=false", Exec::Lazy, false),
            ("gap < 3 || rand() > 0.5", "when:pull=gap < 3 || rand() > 0.5", Exec::Lazy, true),
            ("gap < min(3, n), exec=soft", "when:pull=gap < min(3, n),exec=soft", Exec::Soft, true),
        ] {
            let policy = SyncPolicy::parse(&axis(), text).unwrap();
            assert_eq!(
                (policy.to_string().as_str(), policy.exec, policy.overlap),
                (canonical, exec, overlap)
            );
            let again = SyncPolicy::parse(&axis(), canonical).unwrap();
            assert_eq!((again.to_string().as_str(), again.exec, again.overlap), (canonical, exec, overlap));
        }
    }

    #[test]
    fn wrong_text_says_what_was_expected() {
        for (text, expected) in [
            ("", "a component name is expected"),
            (
                "tap:s=3",
                "unknown consistency model `tap`; known: bsp, asp, ssp, dsps, drop, pssp, psp, quorum, when, remote",
            ),
            ("bsp:exec=eager", "bsp: `exec=eager`: expected auto, lazy or soft"),
            ("bsp:overlap=no", "bsp: `overlap=no`: expected true or false"),
            ("ssp:s=3,cache=yes", "unknown variant `yes`, expected `on` or `off`"),
            ("ssp:s=3,cache=on,overlap=false", "ssp: `cache=on` has no effect with `overlap=false`"),
            ("bsp:cache=on", "unknown field `cache`"),
            ("bsp:s=3", "unknown field `s`"),
            ("progress <", "when: in the pull condition `progress <`, at character 11: expected a number"),
            ("progress < v", "unknown name `v`; known: v_train, n, count"),
            ("rand()", "a condition is expected"),
        ] {
            let error = SyncPolicy::parse(&axis(), text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
