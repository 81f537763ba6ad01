//! Where the coordinator of a job is, when it is whichever of several processes was elected.

use std::sync::{Mutex, MutexGuard};

/// The coordinator that was elected last, for connections to it. They are asked for under a name that stays the same.
#[derive(Debug)]
pub(crate) struct Elected {
    name: String,
    address: Mutex<Option<String>>,
}

impl Elected {
    /// Nobody is elected yet.
    pub(crate) fn new(name: String) -> Elected {
        Elected { name, address: Mutex::new(None) }
    }

    /// The name that connections to the coordinator are asked for under.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether an address is this name.
    pub(crate) fn is_meant(&self, address: &str) -> bool {
        self.name == address
    }

    /// Somebody coordinates the job, and is reached there.
    pub(crate) fn set(&self, address: &str) {
        *self.lock() = Some(address.to_owned());
    }

    /// Where the coordinator is, or was when it was last heard of.
    pub(crate) fn address(&self) -> Result<String, String> {
        self.lock().clone().ok_or_else(|| "no process coordinates the job yet".into())
    }

    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        self.address.lock().expect("no holder of this lock panics")
    }
}
