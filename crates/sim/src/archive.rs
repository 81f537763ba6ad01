//! An archive of checkpoints in memory, which all nodes of a world share. It may be full, and it may take its time: a node that dies
//! meanwhile has written nothing.

use paramill_core::checkpoint::{
    CutRange, Digest, Manifest, Request, Response, SavedFile, ShardCut, SkippedRun, TableCut, Wanted,
    WorkerCut, file, is_outdated, worker_file,
};
use paramill_core::limits;
use paramill_core::wire::{Kind, control};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

/// What was written.
#[derive(Debug, Clone, Default)]
pub struct Archive {
    /// By folder and name.
    files: BTreeMap<(String, String), ShardCut>,
    /// Files of workers, by folder and name: here, and with the workers that made them.
    worker_files: BTreeMap<(String, String), Vec<u8>>,
    packed: BTreeMap<(String, String), Vec<u8>>,
    manifests: BTreeMap<String, Manifest>,
    is_full: bool,
    latency: Duration,
}

impl Archive {
    /// Nothing more can be written, or it can again.
    pub fn set_full(&mut self, is_full: bool) {
        self.is_full = is_full;
    }

    /// How long a request takes.
    pub fn set_latency(&mut self, latency: Duration) {
        self.latency = latency;
    }

    pub(crate) fn latency(&self) -> Duration {
        self.latency
    }

    /// The complete checkpoints, by clock.
    pub fn complete(&self) -> Vec<&Manifest> {
        let mut manifests: Vec<&Manifest> = self.manifests.values().collect();
        manifests.sort_by_key(|manifest| manifest.clock);
        manifests
    }

    /// The folders with something in them.
    pub fn folders(&self) -> Vec<&str> {
        let mut folders: Vec<&str> = self.files.keys().map(|(folder, _)| folder.as_str()).collect();
        folders.dedup();
        folders
    }

    /// What the shards held at a complete checkpoint.
    pub fn cuts(&self, manifest: &Manifest) -> Vec<&ShardCut> {
        let of = |saved: &SavedFile| self.files.get(&(manifest.folder.clone(), saved.name.clone()));
        manifest.files.iter().filter_map(of).collect()
    }

    /// What the workers kept at a complete checkpoint.
    pub fn worker_cuts(&self, manifest: &Manifest) -> Vec<WorkerCut> {
        let names = manifest.worker_files.iter().map(|saved| saved.file.name.clone());
        let files = names.filter_map(|name| self.worker_files.get(&(manifest.folder.clone(), name)));
        files.filter_map(|bytes| control::decode("worker's file", bytes).ok()).collect()
    }

    pub(crate) fn carry_out(&mut self, request: Request) -> Response {
        let full = || "there is no space left on the device".to_owned();
        match request {
            Request::Write { cut, keep, .. } => {
                let folder = cut.folder.clone();
                if self.is_full {
                    return Response::Written { folder, file: Err(full()) };
                }
                let name = file(cut.shard);
                let manifests = &self.manifests;
                self.files.retain(|(other, _), _| {
                    !is_outdated(other, &folder) || keep.contains(other) || manifests.contains_key(other)
                });
                let bytes = cut.tables.iter().map(|table| table.parameters.len() as u64 * 4).sum();
                self.files.insert((folder.clone(), name.clone()), *cut);
                Response::Written { folder, file: Ok(SavedFile { name, bytes, digest: Digest::default() }) }
            }
            Request::Complete { manifest, keep } => {
                let folder = manifest.folder.clone();
                if self.is_full {
                    return Response::Completed { folder, outcome: Err(full()) };
                }
                self.manifests.retain(|other, _| keep.contains(other));
                self.files.retain(|(other, _), _| *other == folder || keep.contains(other));
                self.worker_files.retain(|(other, _), _| *other == folder || keep.contains(other));
                self.manifests.insert(folder.clone(), *manifest);
                Response::Completed { folder, outcome: Ok(()) }
            }
            Request::Pack { cut, .. } => {
                let (folder, name) = (cut.folder.clone(), worker_file(cut.worker));
                let frame = control::frame(Kind::Control, &*cut);
                let bytes = frame.body.bytes().unwrap_or_default().to_vec();
                let file =
                    SavedFile { name: name.clone(), bytes: bytes.len() as u64, digest: Digest::default() };
                // One of each is made at a time.
                self.packed.retain(|(_, other), _| *other != name);
                self.packed.insert((folder.clone(), name), bytes);
                Response::Written { folder, file: Ok(file) }
            }
            Request::Append { place, bytes, whole } => {
                if self.is_full {
                    return Response::Appended(place, Err(full()));
                }
                let file = self.worker_files.entry((place.folder.clone(), whole.name)).or_default();
                file.truncate(place.start as usize);
                file.extend_from_slice(&bytes);
                Response::Appended(place, Ok(bytes.len() as u64))
            }
            Request::Unpack { bytes, .. } => {
                let cut = control::decode::<WorkerCut>("worker's file", &bytes);
                Response::Unpacked(cut.map(Box::new).map_err(|error| error.to_string()))
            }
            // Commands read files of real archives only.
            Request::Read(place) => {
                let key = (place.folder.clone(), place.file.clone());
                let file = self.worker_files.get(&key).or_else(|| self.packed.get(&key));
                let part = file.map(|bytes| {
                    let rest = bytes.get(place.start as usize..).unwrap_or_default();
                    rest[..rest.len().min(limits::MAX_PART_BYTES)].to_vec()
                });
                Response::Read(place, part.ok_or_else(|| "there are no bytes here".into()))
            }
            Request::Restore { resumed, wanted } => {
                let cuts: Vec<&ShardCut> = resumed
                    .files
                    .iter()
                    .filter_map(|saved| self.files.get(&(resumed.folder.clone(), saved.name.clone())))
                    .collect();
                let pieces = |wanted: &Wanted| {
                    let tables = cuts.iter().flat_map(|cut| &cut.tables);
                    let tables = tables.filter(|table| table.name == wanted.name);
                    tables.flat_map(|table| pieces(table, &wanted.ranges)).collect()
                };
                Response::Restored(Ok(wanted.iter().map(pieces).collect()))
            }
        }
    }
}

/// The pieces of a table that are wanted.
fn pieces(table: &TableCut, wanted: &[Range<u64>]) -> Vec<TableCut> {
    let (mut offset, mut pieces) = (0, Vec::new());
    for range in &table.ranges {
        for wanted in wanted {
            let (start, end) = (wanted.start.max(range.start), wanted.end.min(range.elements().end));
            if start >= end {
                continue;
            }
            let at = offset + (start - range.start) as usize;
            let within = at..at + (end - start) as usize;
            let skipped = |run: &SkippedRun| {
                let (from, to) = (run.start.max(start), (run.start + run.len).min(end));
                (from < to).then(|| SkippedRun { start: from, len: to - from, skipped: run.skipped })
            };
            pieces.push(TableCut {
                ranges: vec![CutRange { start, len: end - start, steps: range.steps }],
                skipped: table.skipped.iter().filter_map(skipped).collect(),
                parameters: table.parameters[within.clone()].to_vec(),
                slots: table.slots.iter().map(|slot| slot[within.clone()].to_vec()).collect(),
                ..table.clone()
            });
        }
        offset += range.len as usize;
    }
    pieces
}
