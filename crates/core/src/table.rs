//! Tables: what a job trains, how it is cut into chunks, and which policies hold for it.

mod chunking;
mod layout;
mod pack;

pub use chunking::{Chunk, chunks};
pub(crate) use layout::{Layout, LocalChunk};
pub use pack::{Pack, Packed};

use crate::limits;
use crate::placement::TableSize;
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
    /// Policies of this table alone; the glob in it is not looked at.
    pub policy: Option<PolicyOverride>,
}

impl TableSpec {
    /// A table that is always pushed and pulled whole.
    pub fn dense(name: impl Into<String>, shape: impl Into<Vec<u64>>) -> TableSpec {
        TableSpec { name: name.into(), shape: shape.into(), rows: false, policy: None }
    }

    /// A table of which single rows are pushed and pulled.
    pub fn sparse(name: impl Into<String>, rows: u64, width: u64) -> TableSpec {
        TableSpec { name: name.into(), shape: vec![rows, width], rows: true, policy: None }
    }

    /// Number of parameters; 0 when the product overflows, which [`TableSpec::check`] refuses.
    pub fn elements(&self) -> u64 {
        self.shape.iter().try_fold(1u64, |product, &side| product.checked_mul(side)).unwrap_or(0)
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

    /// The policy of this table on a server: the job's, then the table's own, then the job's exceptions.
    pub fn policy_on<'a>(
        &self,
        server: ServerId,
        job: &TablePolicy,
        overrides: impl IntoIterator<Item = &'a PolicyOverride>,
    ) -> TablePolicy {
        let own = self.policy.as_ref().map(|own| PolicyOverride { table: "*".into(), ..own.clone() });
        let own = PolicyOverride::resolve(job, &own, &self.name, server);
        PolicyOverride::resolve(&own, overrides, &self.name, server)
    }

    /// What placement sees of this table.
    pub fn size(&self) -> TableSize {
        TableSize { elements: self.elements(), row: self.row_elements() }
    }

    /// Whether the declaration can be used; the error says why not.
    pub fn check(&self) -> Result<(), String> {
        let (name, shape) = (&self.name, &self.shape);
        if name.is_empty() || name.len() > limits::MAX_NAME_BYTES {
            // A name that is too long is not repeated.
            return Err(format!(
                "a table name of {} bytes: expected 1 to {}",
                name.len(),
                limits::MAX_NAME_BYTES
            ));
        }
        if shape.len() > limits::MAX_DIMENSIONS {
            return Err(format!(
                "table `{name}` has {} dimensions: expected at most {}",
                shape.len(),
                limits::MAX_DIMENSIONS
            ));
        }
        let elements = self.elements();
        if elements == 0 || elements > limits::MAX_TABLE_ELEMENTS {
            return Err(format!(
                "table `{name}` of shape {shape:?}: expected 1 to {} elements",
                limits::MAX_TABLE_ELEMENTS
            ));
        }
        if self.rows && shape.first().is_none_or(|&rows| rows > u64::from(u32::MAX)) {
            return Err(format!(
                "table `{name}` of shape {shape:?}: a sparse table has 1 to {} rows",
                u32::MAX
            ));
        }
        if self.row_elements() as usize > limits::CHUNK_ELEMENTS {
            return Err(format!(
                "table `{name}`: a row of {} elements does not fit a chunk of {}; declare the table dense",
                self.row_elements(),
                limits::CHUNK_ELEMENTS
            ));
        }
        self.policy
            .as_ref()
            .map_or(Ok(()), |policy| policy.check().map_err(|why| format!("table `{name}`: {why}")))
    }
}

/// How gradients of a round become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduce {
    /// Divided by the number of workers.
    #[default]
    Mean,
    /// Added up.
    Sum,
}

/// In which order gradients of a round are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// As they arrive: one accumulator, whatever the number of workers.
    #[default]
    Arrival,
    /// By worker rank: bit-reproducible, at the price of a buffer per worker.
    Ranked,
}

/// What happens to a gradient with NaN or Inf in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NonFinite {
    /// The worker gets an error that names the table; nothing is changed.
    #[default]
    Reject,
    /// NaN becomes 0, an infinity the largest finite magnitude of the same chunk.
    Clip,
}

/// The policies of one table, in text form, resolved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TablePolicy {
    /// Consistency model.
    pub sync: String,
    /// Optimizer.
    pub optimizer: String,
    /// Mean or sum over workers.
    pub reduce: Reduce,
    /// Order of additions.
    pub order: Order,
    /// NaN and Inf.
    pub nonfinite: NonFinite,
    /// Codec of pushes.
    pub codec: String,
    /// Codec of answers.
    pub answer_codec: String,
}

impl Default for TablePolicy {
    fn default() -> TablePolicy {
        TablePolicy {
            sync: "bsp".into(),
            optimizer: "sgd:lr=0.1".into(),
            reduce: Reduce::default(),
            order: Order::default(),
            nonfinite: NonFinite::default(),
            codec: "none".into(),
            answer_codec: "none".into(),
        }
    }
}

/// Replaces some policies for the tables whose name matches a glob, on one server or on all.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyOverride {
    /// Glob on the table's name (`*` and `?`).
    pub table: String,
    /// Only on this server.
    #[serde(default)]
    pub server: Option<ServerId>,
    /// Another consistency model.
    #[serde(default)]
    pub sync: Option<String>,
    /// Another optimizer.
    #[serde(default)]
    pub optimizer: Option<String>,
    /// Another reduction.
    #[serde(default)]
    pub reduce: Option<Reduce>,
    /// Another order.
    #[serde(default)]
    pub order: Option<Order>,
    /// Another treatment of NaN and Inf.
    #[serde(default)]
    pub nonfinite: Option<NonFinite>,
    /// Another codec of pushes; on all servers.
    #[serde(default)]
    pub codec: Option<String>,
    /// Another codec of answers; on all servers.
    #[serde(default)]
    pub answer_codec: Option<String>,
}

impl PolicyOverride {
    /// Whether its texts have a reasonable length; whether they mean something is seen when they are built.
    pub fn check(&self) -> Result<(), String> {
        let texts = [
            ("glob", Some(&self.table), limits::MAX_NAME_BYTES),
            ("consistency model", self.sync.as_ref(), limits::MAX_POLICY_BYTES),
            ("optimizer", self.optimizer.as_ref(), limits::MAX_POLICY_BYTES),
            ("codec", self.codec.as_ref(), limits::MAX_POLICY_BYTES),
            ("answers' codec", self.answer_codec.as_ref(), limits::MAX_POLICY_BYTES),
        ];
        match texts.into_iter().find(|(_, text, limit)| text.is_some_and(|text| text.len() > *limit)) {
            Some((what, _, limit)) => Err(format!("the text of its {what} has more than {limit} bytes")),
            None => Ok(()),
        }
    }

    /// Whether everything that this says is said by a newer one, about the same tables on the same servers.
    pub fn is_replaced_by(&self, newer: &PolicyOverride) -> bool {
        let said = |rule: &PolicyOverride| {
            [
                rule.sync.is_some(),
                rule.optimizer.is_some(),
                rule.reduce.is_some(),
                rule.order.is_some(),
                rule.nonfinite.is_some(),
                rule.codec.is_some(),
                rule.answer_codec.is_some(),
            ]
        };
        let is_same = self.table == newer.table && self.server == newer.server;
        is_same && said(self).iter().zip(said(newer)).all(|(old, new)| !old || new)
    }

    /// Whether frames of a table mean something else after this change.
    pub fn changes_frames(&self) -> bool {
        self.codec.is_some() || self.answer_codec.is_some()
    }

    /// The policy of `table` on `server` after all overrides; later ones win.
    pub fn resolve<'a>(
        base: &TablePolicy,
        overrides: impl IntoIterator<Item = &'a PolicyOverride>,
        table: &str,
        server: ServerId,
    ) -> TablePolicy {
        let mut policy = base.clone();
        for rule in overrides {
            if !glob_matches(&rule.table, table) || rule.server.is_some_and(|only| only != server) {
                continue;
            }
            policy.sync = rule.sync.clone().unwrap_or(policy.sync);
            policy.optimizer = rule.optimizer.clone().unwrap_or(policy.optimizer);
            policy.reduce = rule.reduce.unwrap_or(policy.reduce);
            policy.order = rule.order.unwrap_or(policy.order);
            policy.nonfinite = rule.nonfinite.unwrap_or(policy.nonfinite);
            policy.codec = rule.codec.clone().unwrap_or(policy.codec);
            policy.answer_codec = rule.answer_codec.clone().unwrap_or(policy.answer_codec);
        }
        policy
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
        let own = |policy| TableSpec { policy: Some(policy), ..TableSpec::dense("w", [1]) };
        let sync = Some("s".repeat(limits::MAX_POLICY_BYTES + 1));
        for (spec, expected) in [
            (TableSpec::dense("", [1]), "a table name of 0 bytes"),
            (TableSpec::dense(long.clone(), [1]), "a table name of 257 bytes"),
            (TableSpec::dense("w", [0]), "expected 1 to"),
            (TableSpec::dense("w", [u64::MAX, 2]), "expected 1 to"),
            (TableSpec::dense("w", [u64::MAX, 0, u64::MAX]), "expected 1 to"),
            (TableSpec::dense("w", [1; 17]), "17 dimensions: expected at most 16"),
            (TableSpec { shape: vec![], ..TableSpec::sparse("w", 1, 1) }, "a sparse table has 1 to"),
            (TableSpec::sparse("w", 1 << 33, 1), "a sparse table has 1 to"),
            (TableSpec::sparse("w", 2, 8193), "does not fit a chunk"),
            (own(PolicyOverride { table: long, ..Default::default() }), "its glob has more than 256 bytes"),
            (
                own(PolicyOverride { sync, ..Default::default() }),
                "consistency model has more than 4096 bytes",
            ),
        ] {
            let why = spec.check().unwrap_err();
            assert!(why.contains(expected) && why.len() < 500, "{why}");
        }
        for spec in [TableSpec::dense("w", []), TableSpec::sparse("w", u64::from(u32::MAX), 1)] {
            assert_eq!(spec.check(), Ok(()));
        }
    }

    #[test]
    fn later_overrides_win_and_a_server_can_be_named() {
        let rules = [
            PolicyOverride { table: "*".into(), sync: Some("asp".into()), ..Default::default() },
            PolicyOverride {
                table: "w".into(),
                server: Some(ServerId(1)),
                sync: Some("ssp:s=3".into()),
                ..Default::default()
            },
        ];
        let sync = |table, server| {
            PolicyOverride::resolve(&TablePolicy::default(), &rules, table, ServerId(server)).sync
        };
        assert_eq!(
            (sync("w", 0), sync("w", 1), sync("v", 1)),
            ("asp".into(), "ssp:s=3".into(), "asp".into())
        );
    }
}
