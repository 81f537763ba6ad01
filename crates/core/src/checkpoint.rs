//! Checkpoints: a consistent cut of a job's parameters and optimizer state, and what is needed to go on from one.
//!
//! The coordinator orders a checkpoint at a clock. Every shard copies a table when its version reaches that clock, while workers go
//! on, and has its driver write the copy to an archive ([`Output::Archive`](crate::role::Output::Archive)). When all files are
//! written the coordinator has its own driver write the [`Manifest`], which names them with their digests: a checkpoint without a
//! manifest does not exist. Workers that keep something from servers at that clock ([`WorkerCut`]) have their drivers make a file of
//! it, which the coordinator reads in parts and has its own driver write. A job that is resumed gets the manifest in its configuration, and every shard asks its driver for
//! the ranges that the new plan gives it, on whichever shard they were before.

use crate::limits;
use crate::policy::{Policy, PolicyOverride};
use crate::table::TableSpec;
use crate::types::{Clock, ShardId, WorkerId};
use crate::wire::PartPlace;
use crate::wire::bounded::sequence;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

/// The format that this release writes, and the newest that it reads.
pub const FORMAT: u32 = 1;

/// Checkpoints that are kept unless the job says otherwise.
pub const KEEP: u32 = 3;

/// When a job makes checkpoints, and how many of them stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckpointPolicy {
    /// When.
    pub every: Every,
    /// The newest ones that stay; at least one.
    pub keep: u32,
}

/// When a job makes checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Every {
    /// At clocks that are multiples of this.
    Steps(u64),
    /// When so much time has passed since the last.
    Time(Duration),
    /// Only when somebody asks for one, and when the job ends.
    Asked,
}

/// The digest of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Digest(pub u128);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
        let text = String::deserialize(deserializer)?;
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let digest = u128::from_str_radix(&text, 16).ok().filter(|_| is_hex);
        digest.map(Digest).ok_or_else(|| serde::de::Error::custom("a digest has 32 hexadecimal digits"))
    }
}

/// A file of a checkpoint: all that one shard held, or that a worker kept from servers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SavedFile {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// XXH3 of 128 bits over all of it.
    pub digest: Digest,
}

/// The file of a worker that kept something from servers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerFile {
    /// Its rank.
    pub worker: WorkerId,
    /// The file, in the coordinator's archive.
    pub file: SavedFile,
}

/// A table of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedTable {
    /// The table as it was declared.
    pub table: TableSpec,
    /// The optimizer whose state is in the files.
    pub optimizer: String,
    /// The consistency model that it was trained under.
    pub sync: String,
}

/// A complete checkpoint: what it is of, and which files it consists of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`] of the release that wrote it.
    pub format: u32,
    /// The job's name.
    pub job: String,
    /// The checkpoint's folder.
    pub folder: String,
    /// The first iteration that is not in it: workers go on with this one.
    pub clock: Clock,
    /// Workers that the job was set up for.
    pub workers: u32,
    /// The job's seed.
    pub seed: u64,
    /// The job's policy, without what was changed while it ran.
    pub policy: Policy,
    /// Exceptions from it, those that were made while the job ran included.
    #[serde(deserialize_with = "sequence::<_, _, MAX_RULES>")]
    pub overrides: Vec<PolicyOverride>,
    /// The tables, in creation order.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_TABLES }>")]
    pub tables: Vec<SavedTable>,
    /// The files, by shard.
    #[serde(deserialize_with = "sequence::<_, _, MAX_SHARDS>")]
    pub files: Vec<SavedFile>,
    /// The files of workers that had something to save, by rank.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    pub worker_files: Vec<WorkerFile>,
}

impl Manifest {
    /// Whether a job with these tables can go on from it; the error says what does not fit.
    pub fn check_tables(&self, tables: &[TableSpec]) -> Result<(), String> {
        let folder = &self.folder;
        for table in tables {
            let Some(SavedTable { table: saved, .. }) = self.table(&table.name) else {
                return Err(format!(
                    "checkpoint {folder} has no table `{}`; it has {}",
                    table.name,
                    self.tables.iter().map(|saved| saved.table.name.as_str()).collect::<Vec<_>>().join(", ")
                ));
            };
            if (&saved.shape, saved.rows, &saved.layers) != (&table.shape, table.rows, &table.layers) {
                return Err(format!(
                    "table `{}` has shape {:?} in checkpoint {folder}, and workers declare it with shape {:?}, or with other \
                     layers",
                    table.name, saved.shape, table.shape
                ));
            }
        }
        let is_declared = |saved: &&SavedTable| tables.iter().any(|table| table.name == saved.table.name);
        match self.tables.iter().find(|saved| !is_declared(saved)) {
            Some(saved) => Err(format!(
                "checkpoint {folder} has a table `{}`, which workers do not declare",
                saved.table.name
            )),
            None => Ok(()),
        }
    }

    /// A table by its name.
    pub fn table(&self, name: &str) -> Option<&SavedTable> {
        self.tables.iter().find(|saved| saved.table.name == name)
    }

    /// What a plan says of it.
    pub fn resumed(&self) -> Resumed {
        let Manifest { folder, clock, files, workers, worker_files, .. } = self;
        Resumed {
            folder: folder.clone(),
            clock: *clock,
            files: files.clone(),
            workers: *workers,
            worker_files: worker_files.clone(),
        }
    }
}

/// Exceptions from policies that a job begins with, and those that were made later.
const MAX_RULES: usize = 2 * limits::MAX_OVERRIDES;

/// Shards in one job.
const MAX_SHARDS: usize = (limits::MAX_SERVERS * limits::MAX_CORES) as usize;

/// The checkpoint that a job goes on from, as its plan says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resumed {
    /// Its folder in every server's archive.
    pub folder: String,
    /// The first clock of the job.
    pub clock: Clock,
    /// Its files. Workers are told of none.
    #[serde(deserialize_with = "sequence::<_, _, MAX_SHARDS>")]
    pub files: Vec<SavedFile>,
    /// Workers that the job was set up for when it was saved.
    pub workers: u32,
    /// Files of those that had something to save. Workers that join later are told of none.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WORKERS as usize }>")]
    pub worker_files: Vec<WorkerFile>,
}

impl Resumed {
    /// Whether its names can be used as names of files. They come from a peer.
    pub fn check(&self) -> Result<(), String> {
        let files = self.files.iter().chain(self.worker_files.iter().map(|saved| &saved.file));
        let names = files.map(|file| &file.name);
        if self
            .worker_files
            .iter()
            .any(|saved| !(1..=limits::MAX_WORKER_FILE_BYTES).contains(&saved.file.bytes))
        {
            return Err("no worker has a file of that length".into());
        }
        match [&self.folder].into_iter().chain(names).find(|name| !is_name(name)) {
            Some(name) => Err(format!("`{}` is no name of a checkpoint's file", name.escape_debug())),
            None => Ok(()),
        }
    }
}

/// Whether a text is a name of a file and nothing else: it leads nowhere, and hides nothing.
pub fn is_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !text.is_empty() && text.len() <= 64 && !text.starts_with('.') && text.bytes().all(is_plain)
}

/// The folder of a checkpoint. Every run of a job, and every attempt in it, has folders of its own, so that files of two of them are
/// never mixed.
pub fn folder(clock: Clock, run: u64, number: u64) -> String {
    format!("step-{clock:010}-{:08x}-{number}", run as u32)
}

/// Whether a folder is of an earlier attempt than another one, or of another run. Without this a server that is slow to write for
/// an order which was given up would remove what others have written for the next.
pub fn is_outdated(name: &str, by: &str) -> bool {
    let attempt = |name: &str| {
        let (rest, number) = name.rsplit_once('-')?;
        let (_, run) = rest.rsplit_once('-')?;
        Some((run.to_owned(), number.parse::<u64>().ok()?))
    };
    match (attempt(name), attempt(by)) {
        (Some((run, number)), Some((newer_run, newer))) => run != newer_run || number < newer,
        _ => false,
    }
}

/// The file of a shard.
pub fn file(shard: ShardId) -> String {
    format!("server-{}-core-{}.safetensors", shard.server.0, shard.core)
}

/// The file of a worker.
pub fn worker_file(worker: WorkerId) -> String {
    format!("worker-{}.safetensors", worker.0)
}

/// Whether a file is one of a worker.
pub fn is_worker_file(name: &str) -> bool {
    let rank = name.strip_prefix("worker-").and_then(|rest| rest.strip_suffix(".safetensors"));
    rank.is_some_and(|rank| rank.parse::<u32>().is_ok())
}

/// All that a worker kept from servers at a checkpoint's clock, and notes of its application.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerCut {
    /// The checkpoint's folder.
    pub folder: String,
    /// The job's name.
    pub job: String,
    /// The checkpoint's clock.
    pub clock: Clock,
    /// The worker.
    pub worker: WorkerId,
    /// What it kept of its tables.
    pub arrays: Vec<WorkerArray>,
    /// The application's notes, by name.
    pub notes: BTreeMap<String, Vec<u8>>,
}

/// What a worker kept of a table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerArray {
    /// The table's name.
    pub table: String,
    /// What it is.
    pub kind: ArrayKind,
    /// The values.
    pub values: Vec<f32>,
    /// What else a worker has to know of them.
    pub state: Vec<u8>,
}

/// What the values of a [`WorkerArray`] are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ArrayKind {
    /// What a codec has not sent yet of every element.
    Residual,
    /// A codec's velocity of every element.
    Velocity,
    /// The last factors of a layer, by its number in the table.
    Factors(u32),
    /// Updates that the policy `hold` holds back: of every element, or of single rows.
    Held,
}

impl fmt::Display for ArrayKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ArrayKind::Residual => write!(f, "residual"),
            ArrayKind::Velocity => write!(f, "velocity"),
            ArrayKind::Factors(layer) => write!(f, "factors{layer}"),
            ArrayKind::Held => write!(f, "held"),
        }
    }
}

/// All that a shard held of its tables at a checkpoint's clock.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardCut {
    /// The checkpoint's folder.
    pub folder: String,
    /// The job's name.
    pub job: String,
    /// The checkpoint's clock.
    pub clock: Clock,
    /// The shard.
    pub shard: ShardId,
    /// The tables of which it holds something.
    pub tables: Vec<TableCut>,
}

/// A table's parameters and optimizer state on one shard.
#[derive(Debug, Clone, PartialEq)]
pub struct TableCut {
    /// The table's name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its version when it was copied.
    pub version: Clock,
    /// Where the elements belong, ascending.
    pub ranges: Vec<CutRange>,
    /// Elements that took part in fewer steps than their range, ascending.
    pub skipped: Vec<SkippedRun>,
    /// The ranges' parameters, one after the other.
    pub parameters: Vec<f32>,
    /// The optimizer's state in the same order, one array for each of its slots.
    pub slots: Vec<Vec<f32>>,
}

/// Neighbouring elements of a table with the same number of optimizer steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CutRange {
    /// First element in the table.
    pub start: u64,
    /// Number of elements.
    pub len: u64,
    /// Optimizer steps on them.
    pub steps: u64,
}

impl CutRange {
    /// Its elements in the table.
    pub fn elements(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.len)
    }
}

/// Neighbouring elements of a table that were left out of some steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedRun {
    /// First element in the table.
    pub start: u64,
    /// Number of elements.
    pub len: u64,
    /// Steps that were made without them.
    pub skipped: u32,
}

/// The ranges of a table that a shard of a resumed job needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The table's name.
    pub name: String,
    /// Slots of its optimizer.
    pub slots: usize,
    /// Elements, ascending.
    pub ranges: Vec<Range<u64>>,
}

/// What a role asks of the archive that its driver keeps.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// Write what a shard held. Folders of other checkpoints that are not to be kept may be removed.
    Write {
        /// What it held.
        cut: Box<ShardCut>,
        /// Folders that are to be kept beside this one.
        keep: Vec<String>,
        /// Whether it has to survive. Otherwise it is read by [`Request::Read`], and there is no archive.
        is_kept: bool,
    },
    /// Read a part of a file.
    Read(PartPlace),
    /// Make a file of what a worker kept, in memory: the coordinator reads it, or a command does.
    Pack {
        /// What it kept.
        cut: Box<WorkerCut>,
        /// The coordinator reads it, once. Otherwise it stays until the next one.
        is_kept: bool,
    },
    /// Make of a worker's file what it kept.
    Unpack {
        /// What the manifest says of the file.
        file: SavedFile,
        /// Its contents.
        bytes: Vec<u8>,
    },
    /// Write a part of a worker's file. With its last part the file has to be whole, and survives.
    Append {
        /// Where the part belongs.
        place: PartPlace,
        /// The part.
        bytes: Vec<u8>,
        /// What the worker says of the file.
        whole: SavedFile,
    },
    /// Write the manifest: all files are written. Then remove the manifests of other folders, but for these.
    Complete {
        /// The manifest.
        manifest: Box<Manifest>,
        /// Folders that are to be kept beside this one.
        keep: Vec<String>,
    },
    /// Read what a shard needs to go on from a checkpoint.
    Restore {
        /// The checkpoint.
        resumed: Resumed,
        /// What is needed of its tables.
        wanted: Vec<Wanted>,
    },
}

/// The archive's answer to a [`Request`].
#[derive(Debug, Clone, PartialEq)]
pub enum Response {
    /// A shard's file is written and will survive, or a worker's is made; or why not.
    Written {
        /// The checkpoint's folder.
        folder: String,
        /// The file, or a sentence.
        file: Result<SavedFile, String>,
    },
    /// A part of a file, or why it cannot be read.
    Read(PartPlace, Result<Vec<u8>, String>),
    /// What a worker kept, or why its file cannot be used.
    Unpacked(Result<Box<WorkerCut>, String>),
    /// So many bytes of a worker's file are written, or why not.
    Appended(PartPlace, Result<u64, String>),
    /// A manifest is written and will survive, or why not.
    Completed {
        /// The checkpoint's folder.
        folder: String,
        /// A sentence, if it is not.
        outcome: Result<(), String>,
    },
    /// The tables that were asked for in their order, each in pieces, or why they cannot be read.
    Restored(Result<Vec<Vec<TableCut>>, String>),
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn manifest(tables: &[TableSpec]) -> Manifest {
        let saved = |table: &TableSpec| SavedTable {
            table: table.clone(),
            optimizer: "sgd".into(),
            sync: "bsp".into(),
        };
        Manifest {
            format: FORMAT,
            job: "job".into(),
            folder: folder(5, 7, 1),
            clock: 5,
            workers: 2,
            seed: 0,
            policy: Policy::default(),
            overrides: vec![],
            tables: tables.iter().map(saved).collect(),
            files: vec![],
            worker_files: vec![],
        }
    }

    #[test]
    fn a_job_goes_on_with_the_tables_of_its_checkpoint_in_any_order_and_with_no_others() {
        let [a, b] = ["a", "b"].map(|name| TableSpec::dense(name, [4]));
        let saved = manifest(&[a.clone(), b.clone()]);
        assert_eq!(saved.check_tables(&[b.clone(), a.clone()]), Ok(()));
        for (tables, words) in [
            (vec![a.clone()], "has a table `b`, which workers do not declare"),
            (vec![a.clone(), b.clone(), TableSpec::dense("c", [1])], "has no table `c`; it has a, b"),
            (vec![a.clone(), TableSpec::dense("b", [5])], "has shape [4] in checkpoint"),
            (vec![a, TableSpec::sparse("b", 4, 1)], "table `b` has shape [4]"),
        ] {
            let why = saved.check_tables(&tables).unwrap_err();
            assert!(why.contains(words), "{why}");
        }
    }

    #[test]
    fn only_earlier_attempts_and_other_runs_are_outdated() {
        let own = folder(20, 7, 5);
        let outdated = |clock, run, number| is_outdated(&folder(clock, run, number), &own);
        assert!(outdated(30, 7, 4) && outdated(20, 8, 9));
        assert!(!outdated(20, 7, 5) && !outdated(10, 7, 6));
        assert!(!is_outdated("step-by-hand", &own));
    }

    #[test]
    fn names_lead_nowhere() {
        let shard = ShardId { server: crate::types::ServerId(3), core: 1 };
        for name in [folder(500, u64::MAX, 3), file(shard), worker_file(WorkerId(7)), "manifest.json".into()]
        {
            assert!(is_name(&name), "{name}");
        }
        assert_eq!(folder(500, 0xabcd, 3), "step-0000000500-0000abcd-3");
        for name in ["", ".", "..", "a/b", "../x", ".hidden", "a\0b", "a b", "\u{e4}", &"x".repeat(65)] {
            assert!(!is_name(name), "{name}");
            let resumed = Resumed { folder: name.into(), ..manifest(&[]).resumed() };
            assert!(resumed.check().is_err());
        }
    }
}
