//! Checkpoints in a folder of this machine: a folder for each, with a safetensors file of every shard and a manifest.
//!
//! A file is written under another name, synced, renamed, and its folder synced, so that a name stands for a whole file after a crash
//! at any moment. The manifest comes last, and goes first when a checkpoint is removed: a folder without one is a checkpoint that
//! was never complete. Digests of all files are in the manifest, and the manifest has one of itself.

mod file;
mod manifest;

use paramill_core::checkpoint::{
    Digest, Manifest, Request, Response, Resumed, SavedFile, ShardCut, TableCut, Wanted, file as file_name,
    is_name, is_outdated,
};
use paramill_core::types::Clock;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The manifest's name in its folder.
pub const MANIFEST: &str = "manifest.json";

/// How folders of checkpoints begin. Others are left alone.
const PREFIX: &str = "step-";

/// Why checkpoints cannot be kept, or gone on from. Nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The folder cannot be used.
    #[error("cannot use {path} for checkpoints: {why}", path = path.display())]
    Folder {
        /// Which.
        path: PathBuf,
        /// What the operating system said.
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

/// The folder with a job's checkpoints, of one server or shared by several.
#[derive(Debug, Clone)]
pub struct Archive {
    path: PathBuf,
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
    /// The archive in a folder, which is made if it is not there.
    pub fn open(path: impl Into<PathBuf>) -> Result<Archive, CheckpointError> {
        let path = path.into();
        match fs::create_dir_all(&path) {
            Ok(()) => Ok(Archive { path }),
            Err(why) => Err(CheckpointError::Folder { path, why }),
        }
    }

    /// Where it is.
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
            let path = self.path.join(&name).join(MANIFEST);
            let text = match fs::read(&path) {
                Ok(text) => text,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
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
                Ok(manifest) => {
                    let modified = fs::metadata(&path).and_then(|metadata| metadata.modified());
                    found.push((manifest.clock, modified.unwrap_or(SystemTime::UNIX_EPOCH), manifest));
                }
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

    /// The survey of a job that begins: with the newest checkpoint if it is to go on from that, and without any otherwise.
    pub fn begin(&self, job: &str, resumes: bool) -> Result<Survey, CheckpointError> {
        let survey = self.survey(job)?;
        match &survey.newest {
            Some(newest) if !resumes => {
                Err(CheckpointError::Unasked { path: self.path.clone(), folder: newest.folder.clone() })
            }
            _ => Ok(survey),
        }
    }

    /// Carries out what a role asks for.
    pub fn carry_out(&self, request: Request) -> Response {
        match request {
            Request::Write { cut, keep } => {
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
        }
    }

    fn explain(&self, what: &str, folder: &str, why: &io::Error) -> String {
        format!("cannot {what} {}: {why}", self.path.join(folder).display())
    }

    /// The names of all folders of checkpoints.
    fn folders(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            if let Ok(name) = entry?.file_name().into_string()
                && name.starts_with(PREFIX)
                && is_name(&name)
            {
                names.push(name);
            }
        }
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
        let folder = self.path.join(folder);
        fs::create_dir_all(&folder)?;
        let temporary = folder.join(format!(".{name}.part"));
        let written = (|| {
            let mut out =
                file::Digesting::new(io::BufWriter::with_capacity(1 << 20, File::create(&temporary)?));
            write(&mut out)?;
            let (out, bytes, digest) = out.finish();
            out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
            fs::rename(&temporary, folder.join(name))?;
            sync_folder(&folder)?;
            sync_folder(&self.path)?;
            Ok((bytes, digest))
        })();
        if written.is_err() {
            // It would take room that the next one needs.
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    /// Removes folders of earlier checkpoints that were never completed, or are not to be kept and have lost their manifest. That
    /// this fails harms nobody.
    fn remove_incomplete(&self, own: &str, keep: &[String]) {
        for name in self.folders().unwrap_or_default() {
            let folder = self.path.join(&name);
            let is_kept = !is_outdated(&name, own) || keep.contains(&name);
            if !is_kept && !folder.join(MANIFEST).exists() {
                let _ = fs::remove_dir_all(folder);
            }
        }
    }

    /// Removes complete checkpoints that are not to be kept, the manifest first.
    fn remove_complete(&self, own: &str, keep: &[String]) {
        for name in self.folders().unwrap_or_default() {
            let folder = self.path.join(&name);
            if name != own && !keep.contains(&name) {
                let _ = fs::remove_file(folder.join(MANIFEST)).and_then(|()| sync_folder(&folder));
                let _ = fs::remove_dir_all(folder);
            }
        }
    }

    /// Whether the files of a checkpoint that are here are whole.
    fn check_files(&self, manifest: &Manifest) -> Result<(), String> {
        let folder = self.path.join(&manifest.folder);
        for saved in &manifest.files {
            let path = folder.join(&saved.name);
            if path.exists() {
                check(&path, saved)?;
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
            if !path.exists() {
                absent.push(saved.name.as_str());
                continue;
            }
            let unreadable = |why: String| format!("{}: {why}", path.display());
            // What the header says is believed when the digest has been compared.
            let has_something = match file::Reader::open(&path) {
                Ok(reader) => wanted.iter().any(|wanted| reader.has(wanted)),
                Err(_) => true,
            };
            if has_something {
                check(&path, saved)?;
                let mut reader = file::Reader::open(&path).map_err(unreadable)?;
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
            present.into_iter().try_for_each(|saved| check(&folder.join(&saved.name), saved))?;
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

/// Whether a file is what its manifest says.
fn check(path: &Path, saved: &SavedFile) -> Result<(), String> {
    let read = || -> io::Result<(u64, Digest)> {
        let mut out = file::Digesting::new(io::sink());
        io::copy(&mut File::open(path)?, &mut out)?;
        let (_, bytes, digest) = out.finish();
        Ok((bytes, digest))
    };
    let (bytes, digest) = read().map_err(|error| format!("{}: {error}", path.display()))?;
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

/// Has the names of files in a folder survive the loss of power.
fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests;
