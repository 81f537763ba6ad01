//! A process that ends the others when the one that started them was killed and could not.
//!
//! It reads the numbers of process groups from its stdin, a line each. The pipe closes when its parent ends, however that
//! happens.

use crate::failure::Failure;
use crate::group;
use anyhow::{Context, Result};
use paramill_node::exhaustion;
use rustix::process::Pid;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

/// How long a process may take to end in good order.
const GRACE: Duration = Duration::from_secs(2);

/// The parent's side. Dropping it ends the keeper, which then ends nothing.
#[derive(Debug)]
pub(super) struct Keeper {
    child: Child,
    groups: Option<ChildStdin>,
}

impl Keeper {
    pub(super) fn start() -> Result<Keeper> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut child = Command::new(program)
            .arg("keeper-process")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Whoever kills the parent's group does not mean the keeper.
            .process_group(0)
            .spawn()
            .map_err(exhaustion::explain)
            .context("cannot start the process that keeps the others")?;
        let groups = child.stdin.take();
        // No guard: Ctrl-C must not end the keeper, since the parent may still be killed while its workers take their time to
        // end. When the pipe closes after them, the keeper finds no group that lives, and ends.
        Ok(Keeper { child, groups })
    }

    /// This group is to be ended too.
    pub(super) fn add(&mut self, group: Pid) {
        if let Some(groups) = &mut self.groups {
            // In one write, so that a number arrives whole or not at all. Without a keeper the groups still end with a parent
            // that is not killed.
            let _ = groups.write_all(format!("{}\n", group.as_raw_nonzero()).as_bytes());
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Killed first: by the end of the pipe alone it would begin to end the others.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The keeper's side: waits for the end of its parent, then ends the groups that it was told of.
pub(crate) fn run() -> Result<(), Failure> {
    let mut groups = Vec::new();
    for line in std::io::stdin().lines() {
        groups.extend(line?.parse().ok().and_then(Pid::from_raw));
    }
    group::end(|| groups.clone(), GRACE);
    Ok(())
}
