//! What a job says of its workers, asked again and again: a process that stands still does not end, and tells nobody.

use super::start_thread;
use anyhow::Result;
use paramill_core::status::WorkerStatus;
use paramill_node::admin::Admin;
use paramill_node::url::JobUrl;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// How often the coordinator is asked.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How long it may take for an answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// The coordinator of a job, as this process asks it.
#[derive(Debug)]
pub(super) struct Watch {
    url: JobUrl,
    /// An answer each time it was asked; `None` where none came.
    answers: Receiver<Option<Vec<WorkerStatus>>>,
}

impl Watch {
    /// Asks in a thread of its own: a coordinator that stands still must not hold up this process.
    pub(super) fn start(url: &str) -> Result<Watch> {
        let url: JobUrl = url.parse()?;
        let (sender, answers) = mpsc::channel();
        let asked = url.clone();
        start_thread(move || {
            let mut admin = None;
            while sender.send(ask(&mut admin, &asked)).is_ok() {
                std::thread::sleep(ASK_EVERY);
            }
        })?;
        Ok(Watch { url, answers })
    }

    /// The newest answer, if there is one that was not taken before.
    pub(super) fn news(&self) -> Option<Vec<WorkerStatus>> {
        self.answers.try_iter().flatten().last()
    }

    /// How the workers stand now.
    pub(super) fn ask(&self) -> Option<Vec<WorkerStatus>> {
        ask(&mut None, &self.url)
    }
}

/// Over the connection of the question before, as long as that answers.
fn ask(admin: &mut Option<Admin>, url: &JobUrl) -> Option<Vec<WorkerStatus>> {
    let mut connection = match admin.take() {
        Some(connection) => connection,
        None => Admin::connect(url, PATIENCE).ok()?,
    };
    let status = connection.status().ok()?;
    *admin = Some(connection);
    Some(status.workers)
}
