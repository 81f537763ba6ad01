//! Tables: what a job trains, and how it is cut into chunks.

mod chunking;
mod layer;
mod layout;
mod pack;

pub use chunking::{Chunk, chunks, chunks_at_most};
pub use layer::{Layer, LayerRef};
pub(crate) use layer::{repeated_name, tables};
pub(crate) use layout::{Layout, LocalChunk, Segment};
pub use pack::{Pack, Packed};

use crate::limits;
use crate::policy::{Policies, Policy, PolicyOverride};
use crate::types::ServerId;
use crate::wire::bounded::sequence;
use serde::{Deserialize, Serialize};

/// A table as a worker declares it. All workers of a job declare the same tables in the same order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TableSpec {
    /// Unique in the job; policies are matched by globs on it.
    pub name: String,
    /// Dimensions. The first is the number of rows of a sparse table.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_DIMENSIONS }>")]
    pub shape: Vec<u64>,
    /// Whether workers push and pull single rows. Rows are then never cut.
    pub rows: bool,
    /// Policies of this table alone.
    pub policy: Policies,
    /// The tensors that the table consists of, ascending; none when it is one tensor itself. See [`TableSpec::layers()`].
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_LAYERS }>")]
    pub layers: Vec<Layer>,
    /// Whether it stays a table of its own ([`TableSpec::alone()`]). Only its worker knows.
    #[serde(skip)]
    pub alone: bool,
}

impl TableSpec {
    /// A table that is always pushed and pulled whole.
    pub fn dense(name: impl Into<String>, shape: impl Into<Vec<u64>>) -> TableSpec {
        TableSpec {
            name: name.into(),
            shape: shape.into(),
            rows: false,
            policy: Policies::default(),
            layers: Vec::new(),
            alone: false,
        }
    }

    /// A table of which single rows are pushed and pulled.
    pub fn sparse(name: impl Into<String>, rows: u64, width: u64) -> TableSpec {
        TableSpec { rows: true, ..TableSpec::dense(name, [rows, width]) }
    }

    /// The same, never put into a pack with other small tables: for one that is pushed or pulled at other times than these, or
    /// is lent as a slab.
    pub fn alone(self) -> TableSpec {
        TableSpec { alone: true, ..self }
    }

    /// Number of parameters; 0 when the product overflows, which [`TableSpec::check`] refuses.
    pub fn elements(&self) -> u64 {
        layer::elements_of(&self.shape)
    }

    /// Elements of its largest layer.
    pub fn largest_layer(&self) -> u64 {
        self.layers.iter().map(Layer::elements).max().unwrap_or_else(|| self.elements())
    }

    /// Parameters in one row.
    pub fn row_elements(&self) -> u64 {
        if self.rows { self.shape.iter().skip(1).product() } else { 1 }
    }

    /// Elements in a row of the table, seen as a matrix; 0 when it is none.
    pub fn columns(&self) -> usize {
        let rows = self.shape.first().copied().unwrap_or(1).max(1);
        if self.shape.len() > 1 { (self.elements() / rows) as usize } else { 0 }
    }

    /// Whether the table consists of several tensors.
    pub fn is_pack(&self) -> bool {
        !self.layers.is_empty()
    }

    /// The table's layers in the order of their elements: those of a pack, and a plain table itself. The declaration must
    /// have passed [`TableSpec::check`].
    pub fn layers(&self) -> impl Iterator<Item = LayerRef<'_>> {
        let plain = (!self.is_pack()).then(|| LayerRef {
            name: &self.name,
            shape: &self.shape,
            range: 0..self.elements() as usize,
        });
        let packed = self.layers.iter().map(|layer| LayerRef {
            name: &layer.name,
            shape: &layer.shape,
            range: layer.start as usize..(layer.start + layer.elements()) as usize,
        });
        plain.into_iter().chain(packed)
    }

    /// The name that globs are matched with: all layers of a pack have the same policies, so the first one stands for them.
    fn policy_name(&self) -> &str {
        self.layers.first().map_or(&self.name, |layer| &layer.name)
    }

    /// Whether a rule holds for this table on a server.
    pub fn is_meant_by(&self, rule: &PolicyOverride, server: ServerId) -> bool {
        rule.is_for(self.policy_name(), server)
    }

    /// The policy of this table on a server: the job's, then the table's own, then the job's exceptions.
    pub fn policy_on<'a>(
        &self,
        server: ServerId,
        job: &Policy,
        overrides: impl IntoIterator<Item = &'a PolicyOverride>,
    ) -> Policy {
        let own = job.clone().under(self.policy.clone());
        PolicyOverride::resolve(own, overrides, self.policy_name(), server)
    }

    /// Whether the declaration can be used; the error says why not.
    pub fn check(&self) -> Result<(), String> {
        let (name, shape) = (&self.name, &self.shape);
        layer::check_name("a table", name)?;
        layer::check_shape("table", name, shape)?;
        if self.rows && shape.first().is_none_or(|&rows| rows > u64::from(u32::MAX)) {
            return Err(format!(
                "table `{name}` of shape {shape:?}: a sparse table has 1 to {} rows",
                u32::MAX
            ));
        }
        if self.row_elements() as usize > limits::MAX_ROW_ELEMENTS {
            return Err(format!(
                "table `{name}`: a row of {} elements does not fit a chunk of {}; declare the table dense",
                self.row_elements(),
                limits::MAX_ROW_ELEMENTS
            ));
        }
        layer::check_layers(self)
    }
}

/// `*` matches any run of characters, `?` any one.
pub fn glob_matches(glob: &str, text: &str) -> bool {
    let (glob, text): (Vec<char>, Vec<char>) = (glob.chars().collect(), text.chars().collect());
    let (mut g, mut t) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while t < text.len() {
        match glob.get(g) {
            Some('*') => {
                retry = Some((g, t));
                g += 1;
            }
            Some(&c) if c == '?' || c == text[t] => {
                g += 1;
                t += 1;
            }
            _ => match retry {
                // The last star takes one more character.
                Some((star, taken)) => {
                    retry = Some((star, taken + 1));
                    g = star + 1;
                    t = taken + 1;
                }
                None => return false,
            },
        }
    }
    glob[g..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs() {
        for (glob, text, expected) in [
            ("*", "", true),
            ("conv*", "conv1.weight", true),
            ("*.weight", "conv1.weight", true),
            ("*.bias", "conv1.weight", false),
            ("c?nv", "conv", true),
            ("a*b*c", "aXbYbZc", true),
            ("", "x", false),
        ] {
            assert_eq!(glob_matches(glob, text), expected, "{glob} on {text}");
        }
    }

    #[test]
    fn declarations_that_cannot_be_used_say_why() {
        let long = "n".repeat(limits::MAX_NAME_BYTES + 1);
        for (spec, expected) in [
            (TableSpec::dense("", [1]), "a table name of 0 bytes"),
            (TableSpec::dense(long, [1]), "a table name of 257 bytes"),
            (TableSpec::dense("w", [0]), "expected 1 to"),
            (TableSpec::dense("w", [u64::MAX, 2]), "expected 1 to"),
            (TableSpec::dense("w", [u64::MAX, 0, u64::MAX]), "expected 1 to"),
            (TableSpec::dense("w", [1; 17]), "17 dimensions: expected at most 16"),
            (TableSpec { shape: vec![], ..TableSpec::sparse("w", 1, 1) }, "a sparse table has 1 to"),
            (TableSpec::sparse("w", 1 << 33, 1), "a sparse table has 1 to"),
            (TableSpec::sparse("w", 2, 8193), "does not fit a chunk"),
        ] {
            let why = spec.check().unwrap_err();
            assert!(why.contains(expected) && why.len() < 500, "{why}");
        }
        for spec in [TableSpec::dense("w", []), TableSpec::sparse("w", u64::from(u32::MAX), 1)] {
            assert_eq!(spec.check(), Ok(()));
        }
    }
}
