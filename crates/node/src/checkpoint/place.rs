//! Where one role has its checkpoints: an archive, a file that the job is resumed from, and memory for what a command reads.

use super::{Archive, copy, file, file_name};
use paramill_core::checkpoint::{Request, Response, SavedFile, worker_file};
use paramill_core::limits;
use paramill_core::types::WorkerId;
use paramill_core::wire::PartPlace;
use std::io;
use std::path::PathBuf;

/// Where the checkpoints of one data core, or of a coordinator, are.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// Where they are kept; nowhere without.
    pub archive: Option<Archive>,
    /// The copy that the job goes on from, instead of the newest one in the archive.
    pub resume: Option<PathBuf>,
    /// Files of checkpoints that are not kept.
    passing: Vec<Passing>,
}

/// A file that a command reads. It goes with the next one, unless a command still reads it.
#[derive(Debug, Clone)]
struct Passing {
    folder: String,
    name: String,
    bytes: Vec<u8>,
    /// It goes when its last part has been read.
    is_read_once: bool,
}

impl Place {
    /// A place with an archive, or without, and with a copy that the job goes on from.
    pub fn new(archive: Option<Archive>, resume: Option<PathBuf>) -> Place {
        Place { archive, resume, passing: Vec::new() }
    }

    /// Carries out what a role asks for.
    pub fn carry_out(&mut self, request: Request) -> Response {
        match (request, &self.archive) {
            (Request::Write { cut, keep, is_kept: false }, _) => {
                let (folder, name) = (cut.folder.clone(), file_name(cut.shard));
                self.passing.retain(|passing| keep.contains(&passing.folder));
                let mut out = file::Digesting::new(Vec::new());
                let written = file::write(&cut, &mut out).map(|()| out.finish());
                let file = written.map(|(contents, bytes, digest)| {
                    self.passing.push(Passing {
                        folder: folder.clone(),
                        name: name.clone(),
                        bytes: contents,
                        is_read_once: false,
                    });
                    SavedFile { name, bytes, digest }
                });
                Response::Written { folder, file: file.map_err(|error| error.to_string()) }
            }
            (Request::Pack { cut, is_kept }, _) => {
                let (folder, name) = (cut.folder.clone(), worker_file(cut.worker));
                self.passing.clear();
                let mut out = file::Digesting::new(Vec::new());
                let written = file::write_worker(&cut, &mut out).map(|()| out.finish());
                let file = written.map(|(contents, bytes, digest)| {
                    let (folder, name) = (folder.clone(), name.clone());
                    self.passing.push(Passing { folder, name, bytes: contents, is_read_once: is_kept });
                    SavedFile { name: worker_file(cut.worker), bytes, digest }
                });
                Response::Written { folder, file: file.map_err(|error| error.to_string()) }
            }
            (Request::Unpack { file, bytes }, _) => {
                Response::Unpacked(file::read_worker(&file, &bytes).map(Box::new))
            }
            (Request::Read(place), archive) => {
                let is_it = |passing: &Passing| passing.folder == place.folder && passing.name == place.file;
                let copied = self.resume.as_ref().zip(worker_of(&place.file));
                let part = match (self.passing.iter().position(is_it), archive, copied) {
                    (Some(at), ..) => Ok(self.passed_on(at, place.start)),
                    (None, Some(archive), _) if archive.has(&place) => {
                        return archive.carry_out(Request::Read(place));
                    }
                    (None, _, Some((path, worker))) => copy::worker_file(path, worker).map(|bytes| {
                        let (folder, name) = (place.folder.clone(), place.file.clone());
                        // Workers read one part after the other.
                        self.passing.push(Passing { folder, name, bytes, is_read_once: true });
                        self.passed_on(self.passing.len() - 1, place.start)
                    }),
                    (None, ..) => Err(unreadable(&place, &io::ErrorKind::NotFound.into())),
                };
                Response::Read(place, part)
            }
            (Request::Restore { resumed, wanted }, _) if self.resume.is_some() => {
                let path = self.resume.clone().unwrap_or_default();
                Response::Restored(copy::restore(&path, &resumed, &wanted))
            }
            (request, Some(archive)) => archive.carry_out(request),
            (request, None) => refusal(
                &request,
                "this server has no place for checkpoints; start every server with --checkpoint DIR".into(),
            ),
        }
    }
}

impl Place {
    /// A part of a file that is in memory, from a byte on.
    fn passed_on(&mut self, at: usize, start: u64) -> Vec<u8> {
        let Passing { bytes, is_read_once, .. } = &self.passing[at];
        let start = usize::try_from(start).unwrap_or(usize::MAX).min(bytes.len());
        let end = bytes.len().min(start.saturating_add(limits::MAX_PART_BYTES));
        let part = bytes[start..end].to_vec();
        if *is_read_once && end == bytes.len() {
            self.passing.remove(at);
        }
        part
    }
}

/// The worker whose file it is, if it is one of a worker.
fn worker_of(file: &str) -> Option<WorkerId> {
    let rank = file.strip_prefix("worker-")?.strip_suffix(".safetensors")?;
    rank.parse().ok().map(WorkerId)
}

fn unreadable(place: &PartPlace, error: &io::Error) -> String {
    format!("cannot read {} of checkpoint {}: {error}", place.file, place.folder)
}

/// The answer to a request that cannot be carried out.
pub(crate) fn refusal(request: &Request, why: String) -> Response {
    match request {
        Request::Write { cut, .. } => Response::Written { folder: cut.folder.clone(), file: Err(why) },
        Request::Complete { manifest, .. } => {
            Response::Completed { folder: manifest.folder.clone(), outcome: Err(why) }
        }
        Request::Restore { .. } => Response::Restored(Err(why)),
        Request::Read(place) => Response::Read(place.clone(), Err(why)),
        Request::Pack { cut, .. } => Response::Written { folder: cut.folder.clone(), file: Err(why) },
        Request::Unpack { .. } => Response::Unpacked(Err(why)),
        Request::Append { place, .. } => Response::Appended(place.clone(), Err(why)),
    }
}
