//! Answers of which nothing was sent before.

use super::Strategy;
use super::pulls::PendingPull;
use super::sender::Sender;
use crate::types::NodeId;

/// Sends all that was asked for when the pull is released.
#[derive(Debug, Default)]
pub(super) struct Direct;

impl Strategy for Direct {
    fn answer(&mut self, pull: &PendingPull, to: NodeId, sender: &mut Sender<'_>) -> bool {
        match &pull.rows {
            None => sender.send_chunks_from(0, to, &pull.into()),
            // The worker asks whether it may go on with what it has.
            Some(rows) if rows.is_empty() => sender.send_nothing(to, &pull.into()),
            Some(rows) => sender.send_rows(rows, to, &pull.into()),
        }
        true
    }
}
