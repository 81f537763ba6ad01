//! Policies: what a job's owner chooses, as text, along one list of axes.
//!
//! [`AXES`] is the list. A [`Policy`] has a text for every axis, [`Policies`] for some of them, and a [`PolicyOverride`]
//! says for which tables, on which server, some of them are others. Command line, config files, scenarios, the plan on the
//! wire and Python embed these values; nobody else writes the axes down.

mod advice;
mod axis;
mod serde_map;
mod typed;

pub use advice::Advice;
pub use axis::{AXES, Axis, Info, Scope, Text};
pub use typed::{Codecs, NonFinite, Order, Reduce};

use crate::codec::Codec;
use crate::consistency::SyncPolicy;
use crate::hold::Hold;
use crate::limits;
use crate::local::{self, LocalSteps};
use crate::optimizer::OptimizerPolicy;
use crate::registry::Registry;
use crate::spec::SpecError;
use crate::table::{TableSpec, glob_matches};
use crate::types::ServerId;
use crate::wire::bounded::sequence;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The texts of some axes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Policies(BTreeMap<Axis, String>);

impl Policies {
    /// These texts.
    ///
    /// # Panics
    ///
    /// Where a text is none of the axis's choices. It is for texts that stand in the code: what somebody typed goes
    /// through [`Policies::set`].
    pub fn of<T: Into<String>>(texts: impl IntoIterator<Item = (Axis, T)>) -> Policies {
        let mut policies = Policies::default();
        for (axis, text) in texts {
            policies.set(axis, text).unwrap_or_else(|error| panic!("{error}"));
        }
        policies
    }

    /// Reads `AXIS=TEXT`, as it is typed.
    pub fn parse<'a>(assignments: impl IntoIterator<Item = &'a str>) -> Result<Policies, SpecError> {
        let mut policies = Policies::default();
        for assignment in assignments {
            let syntax = |why: &str| SpecError::Syntax { text: assignment.to_owned(), why: why.to_owned() };
            let (name, text) = assignment
                .split_once('=')
                .ok_or_else(|| syntax("expected AXIS=TEXT, such as sync=ssp:s=5"))?;
            let axis = Axis::named(name.trim())?;
            if policies.get(axis).is_some() {
                return Err(syntax(&format!("`{axis}` is given twice")));
            }
            policies.set(axis, text.trim())?;
        }
        Ok(policies)
    }

    /// Writes a text down. Numbers and choices are checked at once, the name of a component by [`Policies::check`].
    pub fn set(&mut self, axis: Axis, text: impl Into<String>) -> Result<(), SpecError> {
        let text = text.into();
        axis.check_text(&text)?;
        self.0.insert(axis, text);
        Ok(())
    }

    /// The text of an axis.
    pub fn get(&self, axis: Axis) -> Option<&str> {
        self.0.get(&axis).map(String::as_str)
    }

    /// The axes that something is said about, and what, in the order of the list.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (Axis, &str)> {
        self.0.iter().map(|(axis, text)| (*axis, text.as_str()))
    }

    /// The same with the usual outer optimizer, where workers step by themselves and no optimizer is said.
    pub fn with_outer(mut self) -> Policies {
        if self.get(Axis::Local).is_some_and(|text| text != local::NONE) {
            self.0.entry(Axis::Optimizer).or_insert_with(|| local::OUTER.to_owned());
        }
        self
    }

    /// Whether nothing is said.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// These where they say something, else those below.
    pub fn over(self, below: Policies) -> Policies {
        let mut texts = below.0;
        texts.extend(self.0);
        Policies(texts)
    }

    /// Whether every text means something.
    pub fn check(&self, registry: &Registry) -> Result<(), SpecError> {
        self.iter().try_for_each(|(axis, text)| axis.check(registry, text))
    }
}

/// `sync=asp, codec=f16`.
impl fmt::Display for Policies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (axis, text)) in self.iter().enumerate() {
            write!(f, "{}{axis}={text}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// A text for every axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy(Policies);

impl Default for Policy {
    fn default() -> Policy {
        Policy(Policies(AXES.iter().map(|info| (info.axis, info.default.to_owned())).collect()))
    }
}

impl Policy {
    /// The text of an axis.
    pub fn get(&self, axis: Axis) -> &str {
        self.0.get(axis).expect("a policy has a text for every axis")
    }

    /// Another text for an axis.
    pub fn set(&mut self, axis: Axis, text: impl Into<String>) -> Result<(), SpecError> {
        self.0.set(axis, text)
    }

    /// The same with another text for an axis.
    ///
    /// # Panics
    ///
    /// Where the text is none of the axis's choices; see [`Policies::of`].
    pub fn with(mut self, axis: Axis, text: impl Into<String>) -> Policy {
        self.set(axis, text).unwrap_or_else(|error| panic!("{error}"));
        self
    }

    /// The same where these say nothing.
    pub fn under(self, policies: Policies) -> Policy {
        Policy(policies.over(self.0))
    }

    /// Policies that differ from the defaults.
    pub fn changed(&self) -> Policies {
        let differs = |(axis, text): &(Axis, &str)| axis.info().default != *text;
        Policies(self.0.iter().filter(differs).map(|(axis, text)| (axis, text.to_owned())).collect())
    }

    /// Whether every text means something.
    pub fn check(&self, registry: &Registry) -> Result<(), SpecError> {
        self.0.check(registry)
    }

    /// The consistency model.
    pub fn sync(&self, registry: &Registry) -> Result<SyncPolicy, SpecError> {
        SyncPolicy::parse(&registry.consistency, self.get(Axis::Sync))
    }

    /// The optimizer.
    pub fn optimizer(&self, registry: &Registry) -> Result<OptimizerPolicy, SpecError> {
        OptimizerPolicy::parse(&registry.optimizer, self.get(Axis::Optimizer))
    }

    /// The codecs of both directions.
    pub fn codecs(&self, registry: &Registry) -> Result<Codecs, SpecError> {
        typed::codecs(registry, self.get(Axis::Codec), self.get(Axis::AnswerCodec))
    }

    /// Mean or sum over workers.
    pub fn reduce(&self) -> Reduce {
        if self.get(Axis::Reduce) == "sum" { Reduce::Sum } else { Reduce::Mean }
    }

    /// Order of additions.
    pub fn order(&self) -> Order {
        if self.get(Axis::Order) == "ranked" { Order::Ranked } else { Order::Arrival }
    }

    /// NaN and Inf.
    pub fn nonfinite(&self) -> NonFinite {
        if self.get(Axis::NonFinite) == "clip" { NonFinite::Clip } else { NonFinite::Reject }
    }

    /// Whether frames of a table overtake those of tables that were created later.
    pub fn is_prioritized(&self) -> bool {
        self.get(Axis::Priority) == "front"
    }

    /// Whether servers broadcast a table's versions, instead of answering pulls.
    pub fn is_broadcast(&self) -> bool {
        self.get(Axis::Broadcast) != "none"
    }

    /// Which updates workers hold back, if they hold some.
    pub fn hold(&self, registry: &Registry) -> Result<Option<Hold>, SpecError> {
        Hold::parse(&registry.hold, self.get(Axis::Hold))
    }

    /// The steps that workers make by themselves, if they make some.
    pub fn local(&self, registry: &Registry) -> Result<Option<LocalSteps>, SpecError> {
        LocalSteps::parse(registry, self.get(Axis::Local))
    }

    /// Whether workers make steps by themselves.
    pub fn is_local(&self) -> bool {
        self.get(Axis::Local) != local::NONE
    }

    /// Whether servers need the layers of a table whole: steps depend on their norms, or gradients arrive as factors of
    /// their matrices. Such a table is not cut; see [`JobConfig::whole_tables`](crate::coordinator::JobConfig::whole_tables).
    pub fn needs_whole_layers(&self, registry: &Registry) -> Result<bool, SpecError> {
        Ok(self.optimizer(registry)?.needs_norms() || self.codecs(registry)?.push.needs_whole_layers())
    }

    /// Parameters in one chunk; whole rows, and at least one, of a table of rows.
    pub fn chunk_elements(&self) -> usize {
        typed::elements_in(self.get(Axis::Chunk)).expect("texts are checked when they are written down")
    }
}

/// The policies that a job begins with, for those who declare tables: which ones may share a table depends on them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct JobPolicies {
    /// Policies of every table.
    pub policy: Policy,
    /// Exceptions from them.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_OVERRIDES }>")]
    pub overrides: Vec<PolicyOverride>,
}

impl JobPolicies {
    /// Whether two tables have the same policies on all servers, and their codecs encode both or neither: one that leaves small
    /// layers alone cannot do so in a table with large ones.
    pub fn are_alike(&self, registry: &Registry, one: &TableSpec, other: &TableSpec) -> bool {
        let named = self.overrides.iter().filter_map(|rule| rule.server);
        // A server that no exception names stands for all of these.
        let free =
            (0..=limits::MAX_SERVERS).map(ServerId).find(|server| named.clone().all(|it| it != *server));
        let of = |table: &TableSpec, server| table.policy_on(server, &self.policy, &self.overrides);
        let encodes = |codec: &Codec, table: &TableSpec| codec.encodes_layer_of(table.largest_layer());
        let agrees = |codec: &Codec| encodes(codec, one) == encodes(codec, other);
        named.clone().chain(free).all(|server| {
            let policy = of(one, server);
            // The coordinator refuses what cannot be read.
            let codecs = policy.codecs(registry).ok();
            policy == of(other, server)
                && codecs.is_none_or(|codecs| agrees(&codecs.push) && agrees(&codecs.answer))
        })
    }
}

/// Replaces some policies for the tables whose name matches a glob, on one server or on all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyOverride {
    /// Glob on the table's name (`*` and `?`).
    pub table: String,
    /// Only on this server.
    pub server: Option<ServerId>,
    /// The policies that differ there.
    pub policies: Policies,
}

impl PolicyOverride {
    /// Other policies for the tables that match, on all servers.
    pub fn new(table: impl Into<String>, policies: Policies) -> PolicyOverride {
        PolicyOverride { table: table.into(), server: None, policies }
    }

    /// The same on one server only, if one is named.
    pub fn on(self, server: impl Into<Option<ServerId>>) -> PolicyOverride {
        PolicyOverride { server: server.into(), ..self }
    }

    /// Whether it may be said of some tables, or of one server: what it names is neither the whole job's, nor the same on all
    /// servers of a table. Whether its texts mean something is seen by [`Policies::check`].
    pub fn check(&self) -> Result<(), SpecError> {
        if self.table.len() > limits::MAX_NAME_BYTES {
            let why = format!("its glob has more than {} bytes", limits::MAX_NAME_BYTES);
            return Err(SpecError::Parameter { component: "an exception".into(), why });
        }
        let of_job = self.policies.iter().find(|(axis, _)| axis.info().scope == Scope::Job);
        let of_table = self.policies.iter().find(|(axis, _)| axis.info().scope == Scope::Table);
        match (of_job, of_table, self.server) {
            (Some((axis, _)), ..) => Err(axis.fault("it is the same for the whole job")),
            (None, Some((axis, _)), Some(_)) => {
                Err(axis.fault("it is the same on all servers of a table: leave out `server`"))
            }
            _ => Ok(()),
        }
    }

    /// Whether nothing is left of it once a later one holds.
    pub fn is_replaced_by(&self, later: &PolicyOverride) -> bool {
        let is_said_again = |(axis, _)| later.policies.get(axis).is_some();
        self.table == later.table && self.server == later.server && self.policies.iter().all(is_said_again)
    }

    /// Whether it changes a codec of its tables, so that frames of earlier epochs cannot be decoded.
    pub fn changes_frames(&self) -> bool {
        self.policies.iter().any(|(axis, _)| axis.changes_frames())
    }

    /// Whether it holds for a table on a server.
    pub fn is_for(&self, table: &str, server: ServerId) -> bool {
        glob_matches(&self.table, table) && self.server.is_none_or(|only| only == server)
    }

    /// The policy of `table` on `server` after all overrides; later ones win.
    pub fn resolve<'a>(
        base: Policy,
        overrides: impl IntoIterator<Item = &'a PolicyOverride>,
        table: &str,
        server: ServerId,
    ) -> Policy {
        let holds = |rule: &&PolicyOverride| rule.is_for(table, server);
        overrides.into_iter().filter(holds).fold(base, |policy, rule| policy.under(rule.policies.clone()))
    }
}

#[cfg(test)]
mod tests;
