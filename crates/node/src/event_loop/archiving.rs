//! What a role asks of its archive is done on a thread beside the loop: a disk may take long, and the loop has others to serve.

use super::{EventLoop, RoleCell};
use crate::checkpoint::{Place, refusal};
use crate::clock;
use crate::waker::Doorbell;
use paramill_core::checkpoint::{Request, Response};
use paramill_core::role::Role;
use std::sync::mpsc::{Receiver, Sender, channel};

/// A loop's way to its archive. Requests are carried out one after the other.
pub(super) struct Archivist {
    place: Place,
    bell: Doorbell,
    /// From the first request on.
    requests: Option<Sender<Request>>,
    answered: Sender<Response>,
    answers: Receiver<Response>,
}

impl Archivist {
    /// Rings `bell` for answers.
    pub(super) fn new(place: Place, bell: Doorbell) -> Archivist {
        let (answered, answers) = channel();
        Archivist { place, bell, requests: None, answered, answers }
    }

    /// [`Archivist::take`] brings the answer.
    pub(super) fn ask(&mut self, request: Request) {
        match self.requests.take().map_or_else(|| self.start(), Ok) {
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

    fn start(&self) -> std::io::Result<Sender<Request>> {
        let (requests, asked) = channel::<Request>();
        let (mut place, answered, bell) = (self.place.clone(), self.answered.clone(), self.bell.clone());
        let body = move || {
            for request in asked {
                let _ = answered.send(place.carry_out(request));
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

impl<C: RoleCell> EventLoop<C> {
    /// Hands the archive's answers to the role.
    pub(super) fn take_archived(&mut self) {
        while let Some(response) = self.archivist.take() {
            let now = clock::now();
            self.cell.with(|role| role.handle_archived(now, response));
        }
    }
}
