//! A whole checkpoint in one file, where a command or an application wants it.
//!
//! The file is what the shards' files are, one after the other below one header, with the manifest as metadata and a digest of
//! everything. It is written to another name, synced and renamed: a file that was there before stays until the new one is whole.

use super::file::{Contents, Digesting, Reader, header, header_bytes, parse, write_worker};
use super::storage::{open_file, sync_folder};
use super::{CheckpointError, check};
use crate::admin::{Admin, AdminError};
use paramill_core::checkpoint::{Digest, FORMAT, Manifest, Resumed, SavedFile, TableCut, Wanted};
use paramill_core::types::{Clock, WorkerId};
use paramill_core::wire::PartPlace;
use serde_json::{Map, Value};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The name by which a plan knows the only file of a copy, wherever servers have it.
const NAME: &str = "copy.safetensors";
/// The metadata with the manifest.
const MANIFEST: &str = "manifest";
/// The metadata with the digest of the file, in which itself is zero.
const DIGEST: &str = "xxh3_128";

/// Why there is no copy. A file that was there before is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The job did not make a checkpoint, or a part of it could not be read.
    #[error("{0}")]
    Admin(#[from] AdminError),
    /// The file cannot be written.
    #[error("cannot write {path}: {why}; what was there before is as it was", path = path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// What the operating system said.
        why: io::Error,
    },
    /// A server's file is not what the manifest says.
    #[error("{file} of checkpoint {folder} came damaged: {why}; ask for another one")]
    Damaged {
        /// The file.
        file: String,
        /// The checkpoint.
        folder: String,
        /// What is wrong.
        why: String,
    },
}

/// Has a job make a checkpoint, and copies it into a file. A sentence that names it.
pub fn copy(admin: &mut Admin, path: &Path, at: Option<Clock>) -> Result<String, CopyError> {
    let failed = |why| CopyError::Write { path: path.to_owned(), why };
    let name = path.file_name().ok_or_else(|| failed(io::ErrorKind::IsADirectory.into()))?;
    let folder = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let temporary = folder.join(format!(".{}.{}.part", name.to_string_lossy(), std::process::id()));
    // A folder that is not there, or not to be written to, is told before a job is asked for anything.
    let mut out = File::create(&temporary).map_err(failed)?;
    let copied = (|| {
        let manifest = admin.copy_checkpoint(at)?;
        let bytes = write(admin, &manifest, &mut out).map_err(|stop| match stop {
            Stop::Write(why) => failed(why),
            Stop::Other(error) => error,
        })?;
        out.sync_all().and_then(|()| fs::rename(&temporary, path)).map_err(failed)?;
        sync_folder(folder).map_err(failed)?;
        Ok(format!("checkpoint {} is copied to {} ({bytes} bytes)", manifest.folder, path.display()))
    })();
    if copied.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    copied
}

/// Why a copy ends early.
enum Stop {
    Write(io::Error),
    Other(CopyError),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Stop {
        Stop::Write(error)
    }
}

impl From<CopyError> for Stop {
    fn from(error: CopyError) -> Stop {
        Stop::Other(error)
    }
}

/// Writes the files of a checkpoint one after the other. The length of what was written.
fn write(admin: &mut Admin, manifest: &Manifest, out: &mut File) -> Result<u64, Stop> {
    // Those of workers come last: what they kept stands behind all tables.
    let saved = manifest.files.iter().chain(manifest.worker_files.iter().map(|saved| &saved.file));
    let mut files: Vec<Incoming<'_>> = saved.map(|saved| Incoming::new(&manifest.folder, saved)).collect();
    let (mut tables, mut workers) = (Vec::new(), Vec::new());
    for file in &mut files {
        let contents = file.read_header(admin)?;
        tables.extend(contents.tables);
        workers.extend(contents.workers);
    }
    let Manifest { job, folder, clock, .. } = manifest;
    let contents = Contents {
        format: FORMAT,
        job: job.clone(),
        checkpoint: folder.clone(),
        clock: *clock,
        server: None,
        core: None,
        tables,
        workers,
    };
    let mut metadata = Map::new();
    metadata.insert(MANIFEST.into(), serde_json::to_string(manifest).map_err(io::Error::from)?.into());
    metadata.insert(DIGEST.into(), Value::String(Digest(0).to_string()));
    let header = header(&contents, metadata)?;
    let digest_at = digest_at(header.as_bytes()).map_err(io::Error::other)?;
    let mut digesting = Digesting::new(io::BufWriter::with_capacity(1 << 20, &mut *out));
    digesting.write_all(&(header.len() as u64).to_le_bytes())?;
    digesting.write_all(header.as_bytes())?;
    for file in files {
        file.pass_on(admin, &mut digesting)?;
    }
    let (buffered, bytes, digest) = digesting.finish();
    buffered.into_inner().map_err(io::IntoInnerError::into_error)?;
    out.seek(SeekFrom::Start(digest_at as u64))?;
    out.write_all(digest.to_string().as_bytes())?;
    Ok(bytes)
}

/// Where the digest's digits are in a file with this header.
fn digest_at(header: &[u8]) -> Result<usize, String> {
    let key = format!("\"{DIGEST}\":\"");
    let found = header.windows(key.len()).position(|window| window == key.as_bytes());
    let at = found.map(|at| at + key.len()).filter(|at| at + 32 <= header.len());
    at.map(|at| 8 + at).ok_or_else(|| "it is no copy of a checkpoint".into())
}

/// A file of a shard that comes in parts.
struct Incoming<'a> {
    folder: &'a str,
    saved: &'a SavedFile,
    /// The first byte that is not here yet.
    next: u64,
    /// Bytes that came and were not used.
    part: Vec<u8>,
    hash: Digesting<io::Sink>,
}

impl<'a> Incoming<'a> {
    fn new(folder: &'a str, saved: &'a SavedFile) -> Incoming<'a> {
        Incoming { folder, saved, next: 0, part: Vec::new(), hash: Digesting::new(io::sink()) }
    }

    fn damaged(&self, why: String) -> CopyError {
        CopyError::Damaged { file: self.saved.name.clone(), folder: self.folder.to_owned(), why }
    }

    /// Has the next part brought, behind what is left of the last.
    fn fetch(&mut self, admin: &mut Admin) -> Result<(), CopyError> {
        let (folder, file) = (self.folder.to_owned(), self.saved.name.clone());
        let bytes = admin.read_checkpoint(PartPlace { reader: 0, folder, file, start: self.next })?;
        let left = self.saved.bytes - self.next;
        if bytes.is_empty() || bytes.len() as u64 > left {
            return Err(self.damaged(format!("{} bytes came where {left} are left", bytes.len())));
        }
        self.next += bytes.len() as u64;
        let _ = self.hash.write_all(&bytes);
        self.part.extend_from_slice(&bytes);
        Ok(())
    }

    /// Has at least so many bytes here.
    fn fill(&mut self, admin: &mut Admin, bytes: usize) -> Result<(), CopyError> {
        while self.part.len() < bytes {
            if self.next >= self.saved.bytes {
                return Err(self.damaged("it is too short".into()));
            }
            self.fetch(admin)?;
        }
        Ok(())
    }

    fn read_header(&mut self, admin: &mut Admin) -> Result<Contents, CopyError> {
        self.fill(admin, 8)?;
        let first = *self.part.first_chunk().expect("8 bytes are here");
        let header = header_bytes(first, self.saved.bytes).map_err(|why| self.damaged(why))?;
        self.fill(admin, 8 + header)?;
        let contents = parse(&self.part[8..8 + header], self.saved.bytes).map_err(|why| self.damaged(why))?.0;
        self.part.drain(..8 + header);
        Ok(contents)
    }

    /// Writes what follows the header, and compares the digest of all.
    fn pass_on(mut self, admin: &mut Admin, out: &mut dyn Write) -> Result<(), Stop> {
        loop {
            out.write_all(&self.part)?;
            self.part.clear();
            if self.next == self.saved.bytes {
                break;
            }
            self.fetch(admin)?;
        }
        let digest = std::mem::replace(&mut self.hash, Digesting::new(io::sink())).finish().2;
        match digest == self.saved.digest {
            true => Ok(()),
            false => Err(self.damaged("it has other contents than it was written with".into()).into()),
        }
    }
}

/// The checkpoint in a file, as a manifest with that file only. All of it is read, and must be as it was written.
pub fn open(path: &Path, job: &str) -> Result<Manifest, CheckpointError> {
    let failed = |why| CheckpointError::File { path: path.to_owned(), why };
    let (reader, saved) = verify(path).map_err(failed)?;
    let text = reader.metadata(MANIFEST).ok_or_else(|| failed("it is no copy of a checkpoint".into()))?;
    let manifest = super::manifest::parse(text).map_err(|why| failed(format!("its manifest {why}")))?;
    if manifest.job != job {
        let (path, found) = (path.to_owned(), manifest.job);
        return Err(CheckpointError::Foreign { path, found, job: job.to_owned() });
    }
    Ok(Manifest { files: vec![saved], ..manifest })
}

fn reader(path: &Path) -> Result<Reader, String> {
    Reader::open(open_file(path).map_err(|error| error.to_string())?)
}

/// Compares the digest in a file with its contents.
fn verify(path: &Path) -> Result<(Reader, SavedFile), String> {
    let text = |error: io::Error| error.to_string();
    let mut file = File::open(path).map_err(text)?;
    let reader = self::reader(path)?;
    let mut head = vec![0; reader.data_start() as usize];
    file.read_exact(&mut head).map_err(text)?;
    let at = digest_at(&head[8..])?;
    let written = head[at..at + 32].to_vec();
    let (mut own, mut whole) = (Digesting::new(io::sink()), Digesting::new(io::sink()));
    let _ = whole.write_all(&head);
    head[at..at + 32].copy_from_slice(Digest(0).to_string().as_bytes());
    let _ = own.write_all(&head);
    let mut block = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut block).map_err(text)?;
        if read == 0 {
            break;
        }
        let _ = own.write_all(&block[..read]).and_then(|()| whole.write_all(&block[..read]));
    }
    if own.finish().2.to_string().as_bytes() != written {
        return Err("it is damaged: it has other contents than it was written with".into());
    }
    let (_, bytes, digest) = whole.finish();
    Ok((reader, SavedFile { name: NAME.into(), bytes, digest }))
}

/// A worker's file of the checkpoint in a copy, as it was written.
pub(super) fn worker_file(path: &Path, worker: WorkerId) -> Result<Vec<u8>, String> {
    let cut = reader(path)?.read_worker(worker)?.ok_or("it has nothing of that worker")?;
    let mut bytes = Vec::new();
    write_worker(&cut, &mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// Reads what a shard needs. The plan says which file the coordinator has.
pub(super) fn restore(
    path: &Path,
    resumed: &Resumed,
    wanted: &[Wanted],
) -> Result<Vec<Vec<TableCut>>, String> {
    let saved = match resumed.files.as_slice() {
        [saved] if saved.name == NAME => saved,
        _ => {
            return Err(format!(
                "this server was told to go on from {}, and the job goes on from checkpoint {} of a folder; start all with the \
                 same --resume",
                path.display(),
                resumed.folder
            ));
        }
    };
    let unreadable = |why: String| format!("{}: {why}", path.display());
    let source = open_file(path).map_err(|error| unreadable(error.to_string()))?;
    check(path, source.as_ref(), saved)?;
    let reader = Reader::open(source).map_err(unreadable)?;
    let mut pieces = vec![Vec::new(); wanted.len()];
    for (wanted, pieces) in wanted.iter().zip(&mut pieces) {
        reader.read(wanted, pieces).map_err(unreadable)?;
    }
    Ok(pieces)
}
