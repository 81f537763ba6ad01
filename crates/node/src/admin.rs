//! Asking and setting things from outside a job: `paramill status`, `paramill set`, `paramill drain`, `paramill rebalance`.

use crate::transport::tcp;
use crate::url::JobUrl;
use paramill_core::checkpoint::Manifest;
use paramill_core::limits;
use paramill_core::policy::PolicyOverride;
use paramill_core::role::{Body, Frame};
use paramill_core::status::Status;
use paramill_core::types::{Clock, ServerId};
use paramill_core::wire::control::{decode, frame};
use paramill_core::wire::{
    Control, Fault, HEADER_BYTES, Header, Hello, Kind, PartPlace, Party, Refusal, WireError, padded,
};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Why a command could not be carried out. Nothing was changed, but for a connection that broke after a `set`, and a change
/// that somebody has not followed yet, which is a [`AdminError::Failed`] that says so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdminError {
    /// Nobody answers there.
    #[error("no coordinator at {address}: {why}; is the job running, and is this its URL?")]
    Unreachable {
        /// Where.
        address: String,
        /// What the operating system said.
        why: io::Error,
    },
    /// Somebody took the connection and said nothing.
    #[error("who listens there did not answer in time; is it a coordinator of a Paramill job?")]
    Silent,
    /// The coordinator did not take the connection.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// The coordinator could not do it.
    #[error("{0}")]
    Failed(Fault),
    /// The peer sent something that is no answer.
    #[error("{0}")]
    Wire(#[from] WireError),
    /// The answer was of another kind.
    #[error("unexpected answer: {0}")]
    Unexpected(String),
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Io(io::Error),
}

impl From<io::Error> for AdminError {
    fn from(error: io::Error) -> AdminError {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => AdminError::Silent,
            _ => AdminError::Io(error),
        }
    }
}

/// A connection of a command to a job's coordinator. It may be kept: the coordinator hangs up on commands that say nothing
/// for a while, and the next question then makes a new connection.
#[derive(Debug)]
pub struct Admin {
    url: JobUrl,
    timeout: Duration,
    stream: TcpStream,
    last_used: Instant,
}

impl Admin {
    /// Connects within `timeout`, which also bounds every answer.
    pub fn connect(url: &JobUrl, timeout: Duration) -> Result<Admin, AdminError> {
        let unreachable = |why| AdminError::Unreachable { address: url.address.clone(), why };
        let mut connected = Err(io::Error::other("the name has no address"));
        // The coordinator may be at any of several addresses.
        let mut targets = Vec::new();
        for address in url.address.split(',') {
            match tcp::resolve(address) {
                Ok(found) => targets.extend(found),
                Err(error) => connected = Err(error),
            }
        }
        for target in targets {
            connected = TcpStream::connect_timeout(&target, timeout);
            if connected.is_ok() {
                break;
            }
        }
        let stream = connected.map_err(unreachable)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        stream.set_nodelay(true)?;
        let mut admin = Admin { url: url.clone(), timeout, stream, last_used: Instant::now() };
        let hello = Hello { job: url.job.clone(), from: Party::Command, incarnation: 0, to: None };
        admin.send(frame(Kind::Hello, &hello))?;
        match admin.receive()? {
            (Kind::Welcome, _) => Ok(admin),
            (Kind::Error, payload) => Err(AdminError::Refused(decode("refusal", &payload)?)),
            (kind, _) => Err(AdminError::Unexpected(format!("{kind:?}"))),
        }
    }

    /// How the job stands.
    pub fn status(&mut self) -> Result<Status, AdminError> {
        match self.ask(&Control::StatusQuery)? {
            Control::Status(status) => Ok(*status),
            other => Err(AdminError::Unexpected(format!("{other:?}"))),
        }
    }

    /// Changes policies of the tables that match, on one server or on all. Everybody follows it soon; a status that is asked
    /// for next comes after the servers do. The answer is a sentence, or why it cannot be changed while the job runs.
    pub fn set(&mut self, change: PolicyOverride) -> Result<String, AdminError> {
        match self.ask(&Control::Set(change))? {
            Control::Done(sentence) => Ok(sentence),
            other => Err(AdminError::Unexpected(format!("{other:?}"))),
        }
    }

    /// Moves all shards and copies away from a server, whose process then ends. The answer is a sentence, and comes before the moves
    /// do: a status tells how far they are.
    pub fn drain(&mut self, server: ServerId) -> Result<String, AdminError> {
        match self.ask(&Control::Drain { server })? {
            Control::Done(sentence) => Ok(sentence),
            other => Err(AdminError::Unexpected(format!("{other:?}"))),
        }
    }

    /// Spreads shards over the job's servers anew, by what they carry. The answer is a sentence, and comes before the moves do: a status tells
    /// how far they are.
    pub fn rebalance(&mut self) -> Result<String, AdminError> {
        match self.ask(&Control::Rebalance)? {
            Control::Done(sentence) => Ok(sentence),
            other => Err(AdminError::Unexpected(format!("{other:?}"))),
        }
    }

    /// Has the job make a checkpoint, and waits until that is complete. The answer is a sentence that names it.
    pub fn checkpoint(&mut self) -> Result<String, AdminError> {
        match self.ask(&Control::CheckpointRequest)? {
            Control::Done(sentence) => Ok(sentence),
            other => Err(AdminError::Unexpected(format!("{other:?}"))),
        }
    }

    /// Has the job make a checkpoint of which the files can be read, for as long as this connection lasts: of the clock at which all
    /// workers rest, or of one that comes soon.
    pub fn copy_checkpoint(&mut self, at: Option<Clock>) -> Result<Manifest, AdminError> {
        match self.ask(&Control::CheckpointCopyRequest { at })? {
            Control::CheckpointCopy(manifest) => Ok(*manifest),
            other => Err(AdminError::Unexpected(format!("{other:?}"))),
        }
    }

    /// Reads a part of the checkpoint that was made last: what is left of the file, or as much as fits one message.
    pub fn read_checkpoint(&mut self, place: PartPlace) -> Result<Vec<u8>, AdminError> {
        match self.ask(&Control::CheckpointRead(place))? {
            Control::CheckpointPart(part) => Ok(part.bytes),
            other => Err(AdminError::Unexpected(format!("a `{}` message", other.name()))),
        }
    }

    fn ask(&mut self, message: &Control) -> Result<Control, AdminError> {
        // Long before the coordinator hangs up, so that a question is never on its way then.
        if self.last_used.elapsed() > limits::COMMAND_IDLE / 2 {
            *self = Admin::connect(&self.url, self.timeout)?;
        }
        self.last_used = Instant::now();
        self.send(frame(Kind::Control, message))?;
        let received = self.receive()?;
        // An answer may take long, and what follows belongs to the same connection.
        self.last_used = Instant::now();
        match received {
            (Kind::Control, payload) => Ok(decode("control message", &payload)?),
            (Kind::Error, payload) => Err(AdminError::Failed(decode("error", &payload)?)),
            (kind, _) => Err(AdminError::Unexpected(format!("{kind:?}"))),
        }
    }

    fn send(&mut self, frame: Frame) -> Result<(), AdminError> {
        let Body::Bytes(mut payload) = frame.body else { unreachable!("control frames carry bytes") };
        payload.resize(padded(payload.len()), 0);
        self.stream.write_all(&frame.header.encode())?;
        Ok(self.stream.write_all(&payload)?)
    }

    fn receive(&mut self) -> Result<(Kind, Vec<u8>), AdminError> {
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head)?;
        // Decoding checks the length against the kind's limit before memory is taken for it.
        let header = Header::decode(&head)?;
        let mut payload = vec![0; padded(header.payload_bytes as usize)];
        self.stream.read_exact(&mut payload)?;
        payload.truncate(header.payload_bytes as usize);
        Ok((header.kind, payload))
    }
}
