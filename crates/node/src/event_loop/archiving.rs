//! What a role asks of its archive is done on a thread beside the loop: a disk may take long, and the loop has others to serve.

use super::{EventLoop, RoleCell};
use crate::checkpoint::Archive;
use crate::clock;
use crate::waker::Doorbell;
use paramill_core::checkpoint::{Request, Response};
use paramill_core::role::Role;
use std::sync::mpsc::{Receiver, Sender, channel};

/// A loop's way to its archive. Requests are carried out one after the other.
pub(super) struct Archivist {
    archive: Option<Archive>,
    bell: Doorbell,
    /// From the first request on.
    requests: Option<Sender<Request>>,
    answered: Sender<Response>,
    answers: Receiver<Response>,
}

impl Archivist {
    /// Rings `bell` for answers.
    pub(super) fn new(archive: Option<Archive>, bell: Doorbell) -> Archivist {
        let (answered, answers) = channel();
        Archivist { archive, bell, requests: None, answered, answers }
    }

    /// [`Archivist::take`] brings the answer.
    pub(super) fn ask(&mut self, request: Request) {
        let Some(archive) = &self.archive else {
            let why = "this server has no place for checkpoints; start every server with --checkpoint DIR";
            return self.refuse(&request, why.into());
        };
        match self.requests.take().map_or_else(|| self.start(archive), Ok) {
            Ok(requests) => {
                // The thread ends with this sender, and not before.
                let _ = requests.send(request);
                self.requests = Some(requests);
            }
            Err(error) => self.refuse(&request, format!("no thread can be started for checkpoints: {error}")),
        }
    }

    /// Answers a request that cannot be carried out.
    fn refuse(&self, request: &Request, why: String) {
        let _ = self.answered.send(refusal(request, why));
        self.bell.ring();
    }

    fn start(&self, archive: &Archive) -> std::io::Result<Sender<Request>> {
        let (requests, asked) = channel::<Request>();
        let (archive, answered, bell) = (archive.clone(), self.answered.clone(), self.bell.clone());
        let body = move || {
            for request in asked {
                let _ = answered.send(archive.carry_out(request));
                bell.ring();
            }
        };
        std::thread::Builder::new().name("paramill archive".into()).spawn(body)?;
        Ok(requests)
    }

    fn take(&self) -> Option<Response> {
        self.answers.try_recv().ok()
    }
}

/// The answer to a request that cannot be carried out.
fn refusal(request: &Request, why: String) -> Response {
    match request {
        Request::Write { cut, .. } => Response::Written { folder: cut.folder.clone(), file: Err(why) },
        Request::Complete { manifest, .. } => {
            Response::Completed { folder: manifest.folder.clone(), outcome: Err(why) }
        }
        Request::Restore { .. } => Response::Restored(Err(why)),
    }
}

impl<C: RoleCell> EventLoop<C> {
    /// Hands the archive's answers to the role.
    pub(super) fn take_archived(&mut self) {
        while let Some(response) = self.archivist.take() {
            let now = clock::now();
            self.cell.with(|role| role.handle_archived(now, response));
        }
    }
}
