//! What the processes of one run share on this machine: a folder, and ports that stay theirs while they are away.

use anyhow::{Context, Result, bail};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Below the ports that Linux gives to those who do not ask for one: nobody is given the port of a process that is away.
const PORTS: std::ops::Range<u32> = 20_000..32_000;

/// Folders that this process has made.
static FOLDERS: AtomicU32 = AtomicU32::new(0);

/// A folder that is removed in the end.
#[derive(Debug)]
pub(super) struct Workspace {
    folder: PathBuf,
}

impl Workspace {
    pub(super) fn create() -> Result<Workspace> {
        let (process, number) = (std::process::id(), FOLDERS.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(format!("paramill-chaos-{process}-{number}"));
        std::fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Workspace { folder })
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Addresses on loopback that nobody listens on. Commands that run side by side begin at different places.
    pub(super) fn ports(&self) -> Ports {
        let length = PORTS.end - PORTS.start;
        let first = std::process::id().wrapping_mul(97) % length;
        Ports { first, tried: 0 }
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // What is left is in the folder for temporary files.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Addresses that were free a moment ago.
#[derive(Debug)]
pub(super) struct Ports {
    first: u32,
    tried: u32,
}

impl Ports {
    pub(super) fn next(&mut self) -> Result<String> {
        let length = PORTS.end - PORTS.start;
        while self.tried < length {
            let address = format!("127.0.0.1:{}", PORTS.start + (self.first + self.tried) % length);
            self.tried += 1;
            if TcpListener::bind(&address).is_ok() {
                return Ok(address);
            }
        }
        bail!("no port of {} to {} is free", PORTS.start, PORTS.end - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_removed_and_ports_differ() {
        let workspace = Workspace::create().expect("a folder");
        let folder = workspace.folder().to_owned();
        std::fs::write(folder.join("file"), "content").expect("a file");
        let mut ports = workspace.ports();
        let (one, other) = (ports.next().expect("a port"), ports.next().expect("a port"));
        assert_ne!(one, other);
        drop(workspace);
        assert!(!folder.exists());
    }
}
