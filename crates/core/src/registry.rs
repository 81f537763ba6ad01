//! Which components exist. A registry is a value that is passed down, filled by explicit lists.

use crate::broadcast::{self, Broadcast};
use crate::codec::{self, Stage};
use crate::consistency::{self, Consistency};
use crate::hold::{self, Criterion};
use crate::optimizer::{self, Optimizer};
use crate::placement::{self, Placement};
use crate::spec::{Spec, SpecError};

/// One parameter of a component, for `paramill components` and the manual.
#[derive(Debug, Clone, Copy)]
pub struct Param {
    /// Its key in the text form.
    pub name: &'static str,
    /// The default; `None` when it must be given.
    pub default: Option<&'static str>,
    /// One sentence.
    pub about: &'static str,
}

/// One component: how it is called, what it takes, how it is built.
#[derive(Debug, Clone, Copy)]
pub struct Entry<T: ?Sized> {
    /// Its name in the text form.
    pub name: &'static str,
    /// One sentence.
    pub about: &'static str,
    /// Its own parameters; those that the axis takes for every component are in [`Axis::common`]. One of these is
    /// declared here too where the component has another default for it.
    pub params: &'static [Param],
    /// A text form that builds; tests walk the registry through these.
    pub example: &'static str,
    /// Builds it from its text form.
    pub build: fn(&Spec) -> Result<Box<T>, SpecError>,
}

/// All choices of one axis.
#[derive(Debug)]
pub struct Axis<T: ?Sized> {
    /// The noun for a choice of this axis in messages.
    pub name: &'static str,
    /// Parameters that every component of the axis takes.
    pub common: &'static [Param],
    entries: Vec<Entry<T>>,
}

impl<T: ?Sized> Axis<T> {
    /// An axis with these choices.
    pub fn new(name: &'static str, common: &'static [Param], entries: Vec<Entry<T>>) -> Axis<T> {
        Axis { name, common, entries }
    }

    /// Adds a choice, or replaces the one of the same name.
    pub fn register(&mut self, entry: Entry<T>) {
        self.entries.retain(|known| known.name != entry.name);
        self.entries.push(entry);
    }

    /// The choices, in the order they were registered.
    pub fn entries(&self) -> &[Entry<T>] {
        &self.entries
    }

    /// The choice of this name.
    pub fn entry(&self, name: &str) -> Result<&Entry<T>, SpecError> {
        self.entries.iter().find(|entry| entry.name == name).ok_or_else(|| SpecError::Unknown {
            axis: self.name,
            name: name.to_owned(),
            known: self.entries.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", "),
        })
    }

    /// All parameters that `entry` takes: the common ones, each with the entry's default where it declares one, then its
    /// own.
    pub fn params(&self, entry: &Entry<T>) -> Vec<Param> {
        let declared = |name: &str| entry.params.iter().find(|param| param.name == name);
        let common = self.common.iter().map(|param| declared(param.name).unwrap_or(param));
        let is_common = |param: &&Param| self.common.iter().any(|common| common.name == param.name);
        common.chain(entry.params.iter().filter(|param| !is_common(param))).copied().collect()
    }

    /// Builds the component that `spec` names.
    pub fn build(&self, spec: &Spec) -> Result<Box<T>, SpecError> {
        let entry = self.entry(&spec.name)?;
        (entry.build)(spec).map_err(|error| error.with_example(entry.example))
    }
}

/// Every component that can be named.
#[derive(Debug)]
pub struct Registry {
    /// When pulls are answered and rounds close.
    pub consistency: Axis<dyn Consistency>,
    /// Which server holds what.
    pub placement: Axis<dyn Placement>,
    /// How a gradient changes parameters.
    pub optimizer: Axis<dyn Optimizer>,
    /// How gradients and parameters become fewer bytes.
    pub codec: Axis<Stage>,
    /// On which way parameters reach everybody who reads them.
    pub broadcast: Axis<dyn Broadcast>,
    /// Which updates workers hold back.
    pub hold: Axis<dyn Criterion>,
}

impl Registry {
    /// The components that Paramill ships.
    pub fn builtin() -> Registry {
        Registry {
            consistency: consistency::axis(),
            placement: placement::axis(),
            optimizer: optimizer::axis(),
            codec: codec::axis(),
            broadcast: broadcast::axis(),
            hold: hold::axis(),
        }
    }
}
