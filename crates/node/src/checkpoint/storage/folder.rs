//! A folder of this machine. A file is written under another name, synced, renamed, and its folder synced, so that a name stands for a
//! whole file after a crash at any moment.

use super::{Draft, Source, Storage};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A folder with a folder for every checkpoint.
pub(super) struct Folder {
    path: PathBuf,
}

impl Folder {
    /// The folder, which is made if it is not there.
    pub(super) fn open(path: &Path) -> io::Result<Folder> {
        fs::create_dir_all(path)?;
        Ok(Folder { path: path.to_owned() })
    }
}

impl Storage for Folder {
    fn folders(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            names.extend(entry?.file_name().into_string());
        }
        Ok(names)
    }

    fn create(&self, folder: &str, name: &str) -> io::Result<Box<dyn Draft>> {
        let folder = self.path.join(folder);
        fs::create_dir_all(&folder)?;
        let temporary = folder.join(format!(".{name}.part"));
        let out = BufWriter::with_capacity(1 << 20, File::create(&temporary)?);
        Ok(Box::new(Unnamed { out, temporary, path: folder.join(name), is_finished: false }))
    }

    fn open(&self, folder: &str, name: &str) -> io::Result<Box<dyn Source>> {
        open_file(&self.path.join(folder).join(name))
    }

    fn remove(&self, folder: &str, name: &str) -> io::Result<()> {
        let folder = self.path.join(folder);
        match fs::remove_file(folder.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.and_then(|()| sync_folder(&folder)),
        }
    }

    fn remove_folder(&self, folder: &str) -> io::Result<()> {
        fs::remove_dir_all(self.path.join(folder))
    }
}

/// A file under another name.
struct Unnamed {
    out: BufWriter<File>,
    temporary: PathBuf,
    path: PathBuf,
    is_finished: bool,
}

impl Write for Unnamed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Draft for Unnamed {
    fn finish(mut self: Box<Self>) -> io::Result<()> {
        self.out.flush()?;
        self.out.get_ref().sync_all()?;
        fs::rename(&self.temporary, &self.path)?;
        self.is_finished = true;
        // The file's folder, and the folder of that, which may be new.
        self.path.ancestors().skip(1).take(2).try_for_each(sync_folder)
    }
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        if !self.is_finished {
            // It would take room that the next one needs.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

struct Opened {
    file: File,
    length: u64,
    modified: SystemTime,
}

impl Source for Opened {
    fn len(&self) -> u64 {
        self.length
    }

    fn modified(&self) -> SystemTime {
        self.modified
    }

    fn read_at(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, at)
    }
}

/// Opens a file of this machine.
pub(in crate::checkpoint) fn open_file(path: &Path) -> io::Result<Box<dyn Source>> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
    Ok(Box::new(Opened { file, length: metadata.len(), modified }))
}

/// Has the names of files in a folder survive the loss of power.
pub(in crate::checkpoint) fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}
