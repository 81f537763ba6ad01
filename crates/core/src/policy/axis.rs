//! The list of axes: for each its name, its default, what it is about, how its text is checked, and when it may change.

use super::typed::{codecs, elements_in};
use crate::consistency::SyncPolicy;
use crate::hold::{self, Hold};
use crate::limits;
use crate::local::{self, LocalSteps};
use crate::optimizer::OptimizerPolicy;
use crate::registry::Registry;
use crate::spec::{Spec, SpecError};
use std::fmt;

/// An axis of policies: one choice of a job's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Consistency model.
    Sync,
    /// Which server holds what.
    Placement,
    /// How gradients change parameters.
    Optimizer,
    /// Codec of pushes.
    Codec,
    /// Codec of answers.
    AnswerCodec,
    /// On which way parameters reach everybody.
    Broadcast,
    /// Mean or sum over workers.
    Reduce,
    /// Order of additions.
    Order,
    /// NaN and Inf.
    NonFinite,
    /// Bytes of parameters that travel in one frame.
    Chunk,
    /// Steps that workers make by themselves.
    Local,
    /// Which frames overtake others.
    Priority,
    /// Which updates workers hold back.
    Hold,
}

/// One axis of [`AXES`].
#[derive(Debug)]
pub struct Info {
    /// Which it is.
    pub axis: Axis,
    /// The name that users give it, in every text form.
    pub name: &'static str,
    /// Its text when none is given.
    pub default: &'static str,
    /// One sentence, without the default.
    pub about: &'static str,
    /// For what it can be said.
    pub scope: Scope,
    /// Why it cannot change while a job runs, if it cannot.
    pub fixed: Option<&'static str>,
    /// How its text is read.
    pub text: Text,
}

/// For what a policy can be said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The whole job.
    Job,
    /// A table, on all of its servers.
    Table,
    /// A table on one server.
    Server,
}

/// How the text of an axis is read.
#[derive(Debug, Clone, Copy)]
pub enum Text {
    /// The text form of a component: only a registry tells whether it means something.
    Component(fn(&Registry, &str) -> Result<(), SpecError>),
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A length in bytes.
    Bytes,
}

/// Every axis, in the order in which users are shown them.
pub static AXES: [Info; 13] = [
    Info {
        axis: Axis::Sync,
        name: "sync",
        default: "bsp",
        about: "Consistency model, such as bsp, asp, ssp:s=3 or pssp:s=3,c=0.5",
        scope: Scope::Server,
        fixed: None,
        text: Text::Component(|registry, text| SyncPolicy::parse(&registry.consistency, text).map(|_| ())),
    },
    Info {
        axis: Axis::Placement,
        name: "placement",
        default: "heuristic",
        about: "Which server holds what",
        scope: Scope::Job,
        fixed: Some("parameters stay on the servers that they were given to when the job started"),
        text: Text::Component(|registry, text| registry.placement.build(&Spec::parse(text)?).map(|_| ())),
    },
    Info {
        axis: Axis::Optimizer,
        name: "optimizer",
        default: "sgd:lr=0.1",
        about: "How gradients change parameters, such as adam:lr=1e-3",
        scope: Scope::Server,
        fixed: None,
        text: Text::Component(|registry, text| OptimizerPolicy::parse(&registry.optimizer, text).map(|_| ())),
    },
    Info {
        axis: Axis::Codec,
        name: "codec",
        default: "none",
        about: "How gradients become fewer bytes on their way to the servers, such as topk:0.01+f16",
        scope: Scope::Table,
        fixed: None,
        text: Text::Component(|registry, text| codecs(registry, text, "none").map(|_| ())),
    },
    Info {
        axis: Axis::AnswerCodec,
        name: "answer_codec",
        default: "none",
        about: "The same for parameters on their way to the workers, such as f16 or dvf:delta=1e-3",
        scope: Scope::Table,
        fixed: None,
        text: Text::Component(|registry, text| codecs(registry, "none", text).map(|_| ())),
    },
    Info {
        axis: Axis::Broadcast,
        name: "broadcast",
        default: "none",
        about: "On which way parameters reach the workers: as answers to pulls, or through trees such as rotated:degree=2",
        scope: Scope::Table,
        fixed: Some("replicas and streams were set up when the job started"),
        text: Text::Component(|registry, text| registry.broadcast.build(&Spec::parse(text)?).map(|_| ())),
    },
    Info {
        axis: Axis::Reduce,
        name: "reduce",
        default: "mean",
        about: "How the gradients of a round become one",
        scope: Scope::Server,
        fixed: Some("gradients of the open rounds were added under the one that the job started with"),
        text: Text::Choice(&["mean", "sum"]),
    },
    Info {
        axis: Axis::Order,
        name: "order",
        default: "arrival",
        about: "In which order they are added: as they arrive, or by rank, which is reproducible bit for bit",
        scope: Scope::Server,
        fixed: Some("gradients of the open rounds are kept, or added already, as the job started with"),
        text: Text::Choice(&["arrival", "ranked"]),
    },
    Info {
        axis: Axis::NonFinite,
        name: "nonfinite",
        default: "reject",
        about: "What happens to a gradient with NaN or Inf in it",
        scope: Scope::Server,
        fixed: None,
        text: Text::Choice(&["reject", "clip"]),
    },
    Info {
        axis: Axis::Chunk,
        name: "chunk",
        default: "32KB",
        about: "Bytes of parameters that travel in one frame, and are one core's to step, such as 4KB or 1MB",
        scope: Scope::Job,
        fixed: Some("tables were cut into chunks, and these given to cores, when the job started"),
        text: Text::Bytes,
    },
    Info {
        axis: Axis::Local,
        name: "local",
        default: local::NONE,
        about: "Steps that workers make by themselves between synchronisations, such as steps:h=50,fragments=4",
        scope: Scope::Job,
        fixed: Some("workers go by the schedule that the job started with"),
        text: Text::Component(|registry, text| LocalSteps::parse(registry, text).map(|_| ())),
    },
    Info {
        axis: Axis::Priority,
        name: "priority",
        default: "front",
        about: "Which gradients and parameters overtake others that wait to be sent: those of tables created earlier, or none",
        scope: Scope::Table,
        fixed: None,
        text: Text::Choice(&["front", "none"]),
    },
    Info {
        axis: Axis::Hold,
        name: "hold",
        default: hold::NONE,
        about: "Which updates workers hold back and merge with later ones, such as significance:0.05 or variance:2,most=4",
        scope: Scope::Table,
        fixed: None,
        text: Text::Component(|registry, text| Hold::parse(&registry.hold, text).map(|_| ())),
    },
];

impl Axis {
    /// Every axis, in the order of the list.
    pub fn all() -> impl ExactSizeIterator<Item = Axis> {
        AXES.iter().map(|info| info.axis)
    }

    /// Its place in the list.
    pub fn info(self) -> &'static Info {
        &AXES[self as usize]
    }

    /// The axis of this name; the error names those that exist.
    pub fn named(name: &str) -> Result<Axis, SpecError> {
        let found = AXES.iter().find(|info| info.name == name).map(|info| info.axis);
        found.ok_or_else(|| SpecError::Unknown {
            axis: "policy",
            name: name.chars().take(limits::MAX_NAME_BYTES).collect(),
            known: AXES.iter().map(|info| info.name).collect::<Vec<_>>().join(", "),
        })
    }

    /// Whether a text means something.
    pub fn check(self, registry: &Registry, text: &str) -> Result<(), SpecError> {
        self.check_text(text)?;
        match self.info().text {
            Text::Component(check) => check(registry, text),
            Text::Choice(_) | Text::Bytes => Ok(()),
        }
    }

    /// The same as far as it can be told without a registry.
    pub(super) fn check_text(self, text: &str) -> Result<(), SpecError> {
        if text.len() > limits::MAX_POLICY_BYTES {
            return Err(self.fault(format!("its text has more than {} bytes", limits::MAX_POLICY_BYTES)));
        }
        match self.info().text {
            Text::Choice(choices) if !choices.contains(&text) => {
                let choices: Vec<String> = choices.iter().map(|choice| format!("`{choice}`")).collect();
                Err(self.fault(format!("`{text}`: expected {}", choices.join(" or "))))
            }
            Text::Bytes => elements_in(text).map(|_| ()).map_err(|why| self.fault(why)),
            Text::Choice(_) | Text::Component(_) => Ok(()),
        }
    }

    /// Whether frames under one text are not to be read as frames under another.
    pub fn changes_frames(self) -> bool {
        matches!(self, Axis::Codec | Axis::AnswerCodec)
    }

    /// An error about this axis.
    pub fn fault(self, why: impl Into<String>) -> SpecError {
        SpecError::Parameter { component: self.to_string(), why: why.into() }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.info().name)
    }
}
