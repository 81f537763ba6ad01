//! Names become addresses on a thread of their own: the operating system may take long over one, and an event loop has
//! others to serve meanwhile.

use super::memory::{Letter, Mailbox};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

/// Names that may wait to be resolved for one loop.
const MAX_WAITING: usize = 64;

/// How a name becomes addresses; at least one, or an error.
pub(crate) type Resolve = fn(&str) -> io::Result<Vec<SocketAddr>>;

/// A loop's resolver. Its thread starts with the first name, and ends with the loop.
#[derive(Debug)]
pub(crate) struct Resolver {
    resolve: Resolve,
    mailbox: Arc<Mailbox>,
    questions: Option<SyncSender<Question>>,
}

#[derive(Debug)]
struct Question {
    channel: u64,
    address: String,
}

impl Resolver {
    /// Answers go to `mailbox`.
    pub(crate) fn new(resolve: Resolve, mailbox: Arc<Mailbox>) -> Resolver {
        Resolver { resolve, mailbox, questions: None }
    }

    /// Asks for the addresses of a name; a [`Letter::Resolved`] for `channel` brings them. It may never come: the caller has
    /// its own deadline.
    pub(crate) fn ask(&mut self, channel: u64, address: &str) -> io::Result<()> {
        let questions = match &mut self.questions {
            Some(questions) => questions,
            none => none.insert(start(self.resolve, self.mailbox.clone())?),
        };
        let question = Question { channel, address: address.to_owned() };
        questions.try_send(question).map_err(|error| match error {
            TrySendError::Full(_) => io::Error::other("too many other names wait to be resolved"),
            TrySendError::Disconnected(_) => io::Error::other("the thread that resolves names has ended"),
        })
    }
}

fn start(resolve: Resolve, mailbox: Arc<Mailbox>) -> io::Result<SyncSender<Question>> {
    let (questions, asked) = sync_channel::<Question>(MAX_WAITING);
    let body = move || {
        for Question { channel, address } in asked {
            let targets = resolve(&address).map_err(|error| error.to_string());
            mailbox.put(Letter::Resolved { channel, targets });
        }
    };
    std::thread::Builder::new().name("paramill resolver".into()).spawn(body)?;
    Ok(questions)
}
