//! Ctrl-C ends the command with exit code 130.

use crate::failure::{Failure, INTERRUPTED};
use anyhow::Context;

/// Without this, a shell would see a death by signal, which scripts tell apart from an answer with difficulty.
pub(crate) fn install() -> Result<(), Failure> {
    ctrlc::set_handler(|| std::process::exit(i32::from(INTERRUPTED))).context("cannot listen for Ctrl-C")?;
    Ok(())
}
