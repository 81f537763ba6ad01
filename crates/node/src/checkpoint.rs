//! Checkpoints in a folder of this machine or in an object store: a folder for each, with a safetensors file of every shard and a
//! manifest.
//!
//! A name stands for a whole file after a crash at any moment. The manifest comes last, and goes first when a checkpoint is removed: a
//! folder without one is a checkpoint that was never complete. Digests of all files are in the manifest, and the manifest has one of itself.

mod copy;
mod file;
mod manifest;
mod place;
mod storage;

pub use copy::{CopyError, copy, open};
pub use place::Place;
pub(crate) use place::refusal;

use paramill_core::checkpoint::{
    Digest, Manifest, Request, Response, Resumed, SavedFile, ShardCut, TableCut, Wanted, WorkerFile,
    file as file_name, is_name, is_outdated,
};
use paramill_core::coordinator::Checkpointing;
use paramill_core::limits;
use paramill_core::types::Clock;
use paramill_core::wire::PartPlace;
use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;
use storage::{Draft, Source, Storage};

/// The manifest's name in its folder.
pub const MANIFEST: &str = "manifest.json";

/// How folders of checkpoints begin. Others are left alone.
const PREFIX: &str = "step-";

/// Why checkpoints cannot be kept, or gone on from. Nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The folder or the store cannot be used.
    #[error("cannot use {path} for checkpoints: {why}", path = path.display())]
    Folder {
        /// Which.
        path: PathBuf,
        /// What the operating system or the store said.
        why: io::Error,
    },
    /// It has checkpoints of another job.
    #[error(
        "{path} has checkpoints of job `{found}`, and this is job `{job}`; use another folder, or call the job as before",
        path = path.display()
    )]
    Foreign {
        /// Which.
        path: PathBuf,
        /// Whose.
        found: String,
        /// Who asks.
        job: String,
    },
    /// A file cannot be gone on from.
    #[error("cannot go on from {path}: {why}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// It has checkpoints, and the job is to begin anew.
    #[error(
        "{path} has checkpoint {folder}; give --resume to go on from it, or another folder to begin anew",
        path = path.display()
    )]
    Unasked {
        /// Where.
        path: PathBuf,
        /// The newest one.
        folder: String,
    },
}

/// The folder with a job's checkpoints, of one server or shared by several; or the same below the URL of an object store.
#[derive(Clone)]
pub struct Archive {
    /// As it was given.
    path: PathBuf,
    storage: Arc<dyn Storage>,
    /// The worker's file that is coming in parts.
    arriving: Arc<Mutex<Option<Arriving>>>,
}

impl fmt::Debug for Archive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Archive").field("path", &self.path).finish_non_exhaustive()
    }
}

/// A worker's file of which some parts are here.
struct Arriving {
    folder: String,
    name: String,
    /// The first byte that is not here.
    next: u64,
    out: file::Digesting<Box<dyn Draft>>,
}

/// The complete checkpoints that there are.
#[derive(Debug)]
pub struct Survey {
    /// The newest one that is whole.
    pub newest: Option<Manifest>,
    /// All up to that one, oldest first, by clock and folder.
    pub kept: Vec<(Clock, String)>,
    /// Sentences about those that were passed over.
    pub passed_over: Vec<String>,
}

impl Archive {
    /// The archive in a folder, which is made if it is not there, or below a URL such as s3://BUCKET/PREFIX. Whether a store answers
    /// is not tried.
    pub fn open(path: impl Into<PathBuf>) -> Result<Archive, CheckpointError> {
        let path = path.into();
        match storage::open(&path) {
            Ok(storage) => Ok(Archive { path, storage, arriving: Arc::default() }),
            Err(why) => Err(CheckpointError::Folder { path, why }),
        }
    }

    /// Where it is: a folder, or a URL.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The checkpoints of a job that are complete as far as can be seen from here. Files that are not here may be on other servers;
    /// those that are here must be what the manifest says.
    pub fn survey(&self, job: &str) -> Result<Survey, CheckpointError> {
        let folder = |why| CheckpointError::Folder { path: self.path.clone(), why };
        let mut survey = Survey { newest: None, kept: Vec::new(), passed_over: Vec::new() };
        let mut found: Vec<(Clock, SystemTime, Manifest)> = Vec::new();
        for name in self.folders().map_err(folder)? {
            let read = self.find(&name, MANIFEST).and_then(|found| found.map(read_manifest).transpose());
            let (text, modified) = match read {
                Ok(Some(read)) => read,
                Ok(None) => continue,
                Err(error) => {
                    survey.passed_over.push(format!("checkpoint {name} cannot be read: {error}"));
                    continue;
                }
            };
            match manifest::decode(&text) {
                Ok(manifest) if manifest.job != job => {
                    let (path, found) = (self.path.clone(), manifest.job);
                    return Err(CheckpointError::Foreign { path, found, job: job.to_owned() });
                }
                Ok(manifest) if manifest.folder != name => {
                    let was = manifest.folder;
                    survey
                        .passed_over
                        .push(format!("checkpoint {name} was called {was}; call it that again"));
                }
                Ok(manifest) => found.push((manifest.clock, modified, manifest)),
                Err(why) => survey.passed_over.push(format!("the manifest of checkpoint {name} {why}")),
            }
        }
        found.sort_by_key(|(clock, modified, _)| (*clock, *modified));
        while let Some((_, _, manifest)) = found.pop() {
            match self.check_files(&manifest) {
                Ok(()) => {
                    let older = found.iter().map(|(clock, _, manifest)| (*clock, manifest.folder.clone()));
                    survey.kept = older.chain([(manifest.clock, manifest.folder.clone())]).collect();
                    survey.newest = Some(manifest);
                    break;
                }
                Err(why) => survey.passed_over.push(format!("checkpoint {}: {why}", manifest.folder)),
            }
        }
        if let Some(newest) = &survey.newest {
            let instead = format!("; {} is whole", newest.folder);
            survey.passed_over.iter_mut().for_each(|sentence| sentence.push_str(&instead));
        }
        Ok(survey)
    }

    /// Whether a job may begin: not beside the checkpoints of an earlier run that it does not go on from, which would be taken for its own.
    pub fn check_new(&self, job: &Checkpointing) -> Result<(), CheckpointError> {
        match job.kept.last() {
            Some((_, newest)) if job.resume.as_ref().is_none_or(|resumed| resumed.folder != *newest) => {
                Err(CheckpointError::Unasked { path: self.path.clone(), folder: newest.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Carries out what a role asks for.
    pub fn carry_out(&self, request: Request) -> Response {
        match request {
            Request::Write { cut, keep, .. } => {
                let folder = cut.folder.clone();
                let file = self.write(&cut).map_err(|why| self.explain("write", &cut.folder, &why));
                if file.is_ok() {
                    self.remove_incomplete(&folder, &keep);
                }
                Response::Written { folder, file }
            }
            Request::Complete { manifest, keep } => {
                let folder = manifest.folder.clone();
                let outcome = self.complete(&manifest).map_err(|why| self.explain("complete", &folder, &why));
                if outcome.is_ok() {
                    self.remove_complete(&folder, &keep);
                }
                Response::Completed { folder, outcome }
            }
            Request::Restore { resumed, wanted } => Response::Restored(self.restore(&resumed, &wanted)),
            Request::Append { place, bytes, whole } => {
                let written = self.append(&place, &bytes, &whole);
                let written = written.map_err(|why| self.explain("write", &place.folder, &why));
                Response::Appended(place, written)
            }
            // What a worker keeps is in its own memory.
            Request::Pack { .. } | Request::Unpack { .. } => {
                refusal(&request, "an archive has no workers".into())
            }
            Request::Read(place) => {
                let part = self.read(&place).map_err(|why| self.explain("read", &place.folder, &why));
                Response::Read(place, part)
            }
        }
    }

    /// Whether it has a file, or would say why that cannot be read.
    pub(super) fn has(&self, place: &PartPlace) -> bool {
        is_name(&place.folder)
            && is_name(&place.file)
            && !matches!(self.find(&place.folder, &place.file), Ok(None))
    }

    /// Writes a part of a worker's file, which has no name until it is whole. How many bytes it wrote.
    fn append(&self, place: &PartPlace, bytes: &[u8], whole: &SavedFile) -> io::Result<u64> {
        let PartPlace { folder, file: name, start, .. } = place;
        // The names are a peer's.
        if !is_name(folder) || !is_name(name) || *name != whole.name {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let end = start + bytes.len() as u64;
        let mut arriving = self.arriving.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |arriving: &Arriving| {
            (&arriving.folder, &arriving.name, arriving.next) == (folder, name, *start) && *start > 0
        };
        // What came of a file that was given up goes before another one begins. So does this one when it cannot go on.
        let mut current = match arriving.take().filter(is_it) {
            Some(current) => current,
            None if *start == 0 => {
                let out = file::Digesting::new(self.storage.create(folder, name)?);
                Arriving { folder: folder.clone(), name: name.clone(), next: 0, out }
            }
            None => return Err(io::Error::other("its first parts are not here")),
        };
        current.out.write_all(bytes)?;
        current.next = end;
        if end < whole.bytes {
            *arriving = Some(current);
        } else {
            let (draft, length, digest) = current.out.finish();
            compare(&self.locate(folder, name), (length, digest), whole).map_err(io::Error::other)?;
            draft.finish()?;
        }
        Ok(bytes.len() as u64)
    }

    /// A part of a file, or what is left of it.
    fn read(&self, place: &PartPlace) -> io::Result<Vec<u8>> {
        let PartPlace { folder, file, start, .. } = place;
        // The names are a peer's.
        if !is_name(folder) || !is_name(file) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let source = self.storage.open(folder, file)?;
        let left = source.len().saturating_sub(*start);
        let mut part = vec![0; left.min(limits::MAX_PART_BYTES as u64) as usize];
        if !part.is_empty() {
            source.read_at(*start, &mut part)?;
        }
        Ok(part)
    }

    /// A file's path, for people.
    fn locate(&self, folder: &str, name: &str) -> PathBuf {
        self.path.join(folder).join(name)
    }

    /// Opens a file, if it is there. That this cannot be found out is another thing.
    fn find(&self, folder: &str, name: &str) -> io::Result<Option<Box<dyn Source>>> {
        match self.storage.open(folder, name) {
            Ok(source) => Ok(Some(source)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn explain(&self, what: &str, folder: &str, why: &io::Error) -> String {
        format!("cannot {what} {}: {why}", self.path.join(folder).display())
    }

    /// The names of all folders of checkpoints.
    fn folders(&self) -> io::Result<Vec<String>> {
        let mut names = self.storage.folders()?;
        names.retain(|name| name.starts_with(PREFIX) && is_name(name));
        names.sort();
        Ok(names)
    }

    fn write(&self, cut: &ShardCut) -> io::Result<SavedFile> {
        let name = file_name(cut.shard);
        let (bytes, digest) = self.put(&cut.folder, &name, |out| file::write(cut, out))?;
        Ok(SavedFile { name, bytes, digest })
    }

    fn complete(&self, manifest: &Manifest) -> io::Result<()> {
        let text = manifest::encode(manifest)?;
        self.put(&manifest.folder, MANIFEST, |out| out.write_all(text.as_bytes())).map(|_| ())
    }

    /// Writes a file of a checkpoint so that it is whole or not there, whatever happens. Its length and digest.
    fn put(
        &self,
        folder: &str,
        name: &str,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<(u64, Digest)> {
        let mut out = file::Digesting::new(self.storage.create(folder, name)?);
        write(&mut out)?;
        let (draft, bytes, digest) = out.finish();
        draft.finish()?;
        Ok((bytes, digest))
    }

    /// Removes folders of earlier checkpoints that were never completed, or are not to be kept and have lost their manifest. That
    /// this fails harms nobody.
    fn remove_incomplete(&self, own: &str, keep: &[String]) {
        for name in self.folders().unwrap_or_default() {
            let is_kept = !is_outdated(&name, own) || keep.contains(&name);
            if !is_kept && self.find(&name, MANIFEST).is_ok_and(|found| found.is_none()) {
                let _ = self.storage.remove_folder(&name);
            }
        }
    }

    /// Removes complete checkpoints that are not to be kept, the manifest first.
    fn remove_complete(&self, own: &str, keep: &[String]) {
        for name in self.folders().unwrap_or_default() {
            if name != own && !keep.contains(&name) {
                let removed = self.storage.remove(&name, MANIFEST);
                let _ = removed.and_then(|()| self.storage.remove_folder(&name));
            }
        }
    }

    /// Whether the files of a checkpoint that are here are whole.
    fn check_files(&self, manifest: &Manifest) -> Result<(), String> {
        // Those of workers are where the manifest is.
        let workers = manifest.worker_files.iter().map(|WorkerFile { file, .. }| (file, true));
        for (saved, is_here) in manifest.files.iter().map(|saved| (saved, false)).chain(workers) {
            let path = self.locate(&manifest.folder, &saved.name);
            match self.find(&manifest.folder, &saved.name) {
                Ok(Some(source)) => check(&path, source.as_ref(), saved)?,
                Ok(None) if is_here => return Err(format!("{} is not there", path.display())),
                Ok(None) => {}
                Err(error) => return Err(format!("{}: {error}", path.display())),
            }
        }
        Ok(())
    }

    /// Reads what a shard needs, from whichever files have it.
    fn restore(&self, resumed: &Resumed, wanted: &[Wanted]) -> Result<Vec<Vec<TableCut>>, String> {
        resumed.check()?;
        let folder = self.path.join(&resumed.folder);
        let mut pieces = vec![Vec::new(); wanted.len()];
        let mut absent = Vec::new();
        for saved in &resumed.files {
            let path = folder.join(&saved.name);
            let unreadable = |why: String| format!("{}: {why}", path.display());
            let open =
                || self.find(&resumed.folder, &saved.name).map_err(|error| unreadable(error.to_string()));
            let Some(source) = open()? else {
                absent.push(saved.name.as_str());
                continue;
            };
            // What the header says is believed when the digest has been compared.
            let has_something = match file::Reader::open(source) {
                Ok(reader) => wanted.iter().any(|wanted| reader.has(wanted)),
                Err(_) => true,
            };
            if has_something {
                let gone = || unreadable("it was removed".into());
                let source = open()?.ok_or_else(gone)?;
                check(&path, source.as_ref(), saved)?;
                let reader = file::Reader::open(source).map_err(unreadable)?;
                for (wanted, pieces) in wanted.iter().zip(&mut pieces) {
                    reader.read(wanted, pieces).map_err(unreadable)?;
                }
            }
        }
        for (wanted, pieces) in wanted.iter().zip(&pieces) {
            let found: u64 =
                pieces.iter().flat_map(|piece: &TableCut| &piece.ranges).map(|range| range.len).sum();
            let needed: u64 = wanted.ranges.iter().map(|range| range.end - range.start).sum();
            if found == needed {
                continue;
            }
            // A file that was passed over for what its header says may be damaged just there.
            let present = resumed.files.iter().filter(|saved| !absent.contains(&saved.name.as_str()));
            for saved in present {
                let path = folder.join(&saved.name);
                if let Ok(Some(source)) = self.find(&resumed.folder, &saved.name) {
                    check(&path, source.as_ref(), saved)?;
                }
            }
            return Err(format!(
                "this server needs parameters of table `{}` that are in {}, which is not in {}; copy the files of all servers \
                 there, or use a folder that they share",
                wanted.name,
                if absent.is_empty() { "another file".to_owned() } else { absent.join(", ") },
                folder.display()
            ));
        }
        Ok(pieces)
    }
}

/// A manifest's text, and when it was written.
fn read_manifest(source: Box<dyn Source>) -> io::Result<(Vec<u8>, SystemTime)> {
    // A copy in one file has the manifest in its header.
    if source.len() > limits::MAX_CHECKPOINT_HEADER_BYTES {
        return Err(io::Error::other("its manifest is too long"));
    }
    let mut text = Vec::new();
    storage::pass_on(source.as_ref(), &mut text)?;
    Ok((text, source.modified()))
}

/// Whether a file is what its manifest says.
fn check(path: &Path, source: &dyn Source, saved: &SavedFile) -> Result<(), String> {
    let mut out = file::Digesting::new(io::sink());
    // One of another length need not be read.
    if source.len() == saved.bytes {
        storage::pass_on(source, &mut out).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let (_, _, digest) = out.finish();
    compare(path, (source.len(), digest), saved)
}

/// Whether a file with this length and digest is what its manifest, or the worker that sent it, says.
fn compare(path: &Path, (bytes, digest): (u64, Digest), saved: &SavedFile) -> Result<(), String> {
    if (bytes, digest) == (saved.bytes, saved.digest) {
        return Ok(());
    }
    let what = if bytes == saved.bytes {
        "other contents than it was written with".into()
    } else {
        format!("{bytes} bytes, and was written with {}", saved.bytes)
    };
    Err(format!("{} is damaged: it has {what}", path.display()))
}

#[cfg(test)]
mod tests;
