//! Where the files of an archive are: in a folder of this machine, or in an object store. Only these know how a file is written so that
//! it is whole under its name; digests, manifests and what is kept are the archive's.

#[cfg(feature = "object-store")]
mod bucket;
mod folder;

pub(super) use folder::{open_file, sync_folder};

use folder::Folder;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// Bytes that are read at once of a file that is read from its beginning to its end.
const BLOCK: usize = 4 << 20;

/// Where an archive has its files. Five required methods. Folders and files are called what
/// [`is_name`](paramill_core::checkpoint::is_name) lets pass: the archive has checked that.
pub(super) trait Storage: Send + Sync {
    /// The names of all folders, in any order, those of others included.
    fn folders(&self) -> io::Result<Vec<String>>;

    /// Begins a file. It MUST NOT be there under its name before [`Draft::finish`] says so, and what was there before MUST stay until then.
    fn create(&self, folder: &str, name: &str) -> io::Result<Box<dyn Draft>>;

    /// Opens a file. [`io::ErrorKind::NotFound`] MUST mean that it is not there: checkpoints without a manifest are removed.
    fn open(&self, folder: &str, name: &str) -> io::Result<Box<dyn Source>>;

    /// Removes a file, if it is there, and MUST NOT return before that survives.
    fn remove(&self, folder: &str, name: &str) -> io::Result<()>;

    /// Removes a folder with all files that are in it.
    fn remove_folder(&self, folder: &str) -> io::Result<()>;
}

/// A file that is being written. One required method. Dropped before it is finished, it MUST leave nothing behind that takes room.
pub(super) trait Draft: Write + Send {
    /// Gives the file its name. It MUST be whole, and survive, when this returns.
    fn finish(self: Box<Self>) -> io::Result<()>;
}

/// A file that is read. Three required methods.
pub(super) trait Source {
    /// Its length when it was opened.
    fn len(&self) -> u64;

    /// When it was written.
    fn modified(&self) -> SystemTime;

    /// Fills `bytes` with what is in the file from a byte on. MUST fail when the file is too short.
    fn read_at(&self, at: u64, bytes: &mut [u8]) -> io::Result<()>;
}

/// The storage in a folder, which is made if it is not there, or below a URL. No request is made of a store.
pub(super) fn open(place: &Path) -> io::Result<Arc<dyn Storage>> {
    match place.to_str().and_then(|text| text.split_once("://")) {
        None => Ok(Arc::new(Folder::open(place)?)),
        Some(("file", path)) if path.starts_with('/') => Ok(Arc::new(Folder::open(Path::new(path))?)),
        Some(("file", _)) => Err(io::Error::other("expected file:///FOLDER")),
        #[cfg(feature = "object-store")]
        Some(_) => Ok(Arc::new(bucket::Bucket::open(&place.to_string_lossy())?)),
        #[cfg(not(feature = "object-store"))]
        Some(_) => Err(io::Error::other(
            "this program was built without object stores; build it with the cargo feature `object-store`, or give a folder",
        )),
    }
}

/// An empty storage in memory that object stores are tested with.
#[cfg(all(test, feature = "object-store"))]
pub(super) fn in_memory() -> Arc<dyn Storage> {
    Arc::new(bucket::Bucket::in_memory())
}

/// Passes a file on from its beginning to its end.
pub(super) fn pass_on(source: &dyn Source, out: &mut dyn Write) -> io::Result<()> {
    let length = source.len();
    let mut block = vec![0; length.min(BLOCK as u64) as usize];
    let mut at = 0;
    while at < length {
        let part = &mut block[..(length - at).min(BLOCK as u64) as usize];
        source.read_at(at, part)?;
        out.write_all(part)?;
        at += part.len() as u64;
    }
    Ok(())
}
