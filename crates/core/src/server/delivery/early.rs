//! Answers that are sent chunk by chunk before their pull is released.
//!
//! Where a round waits for all workers, a chunk that has all its gradients has its final values long before the round
//! closes. Workers that pushed with a wish for the parameters get it at once: links carry both ways all the time, and the
//! chunk is sent while it is in the cache. The last chunk of an answer waits for the consistency controller, so that no
//! answer is complete before its pull is released.

use super::pulls::PendingPull;
use super::sender::{Reply, Sender};
use super::{NewChunk, Strategy};
use crate::types::{NodeId, WorkerId};

/// The answers that have begun, or will, by table.
#[derive(Debug, Default)]
pub(super) struct Early {
    by_table: Vec<Vec<EarlyAnswer>>,
}

/// An answer to a pull that is not released yet.
#[derive(Debug)]
struct EarlyAnswer {
    worker: WorkerId,
    reply: Reply,
    /// How many of its chunks were sent, from the first on.
    sent: usize,
}

impl Strategy for Early {
    fn expect(&mut self, pull: &PendingPull) {
        if self.by_table.len() <= pull.table {
            self.by_table.resize_with(pull.table + 1, Vec::new);
        }
        let answers = &mut self.by_table[pull.table];
        answers.retain(|answer| answer.worker != pull.worker);
        answers.push(EarlyAnswer { worker: pull.worker, reply: pull.into(), sent: 0 });
    }

    fn chunk_exists(&mut self, chunk: NewChunk, sender: &mut Sender<'_>) {
        let Some(answers) = self.by_table.get_mut(chunk.table) else { return };
        for answer in answers {
            if answer.reply.clock == chunk.version && answer.sent == chunk.index {
                sender.send_chunk(chunk.index, NodeId::Worker(answer.worker), &answer.reply);
                answer.sent += 1;
            }
        }
    }

    /// Sends the chunks that were not sent yet.
    fn answer(&mut self, pull: &PendingPull, to: NodeId, sender: &mut Sender<'_>) -> bool {
        let Some(answers) = self.by_table.get_mut(pull.table) else { return false };
        let is_answered =
            |answer: &EarlyAnswer| answer.worker == pull.worker && answer.reply.request == pull.request;
        let Some(place) = answers.iter().position(is_answered) else { return false };
        let answer = answers.swap_remove(place);
        sender.send_chunks_from(answer.sent, to, &Reply { delay: pull.delay, ..answer.reply });
        true
    }

    fn forget(&mut self, receiver: NodeId) {
        let NodeId::Worker(worker) = receiver else { return };
        self.by_table.iter_mut().for_each(|answers| answers.retain(|answer| answer.worker != worker));
    }

    fn abandon(&mut self, table: usize, worker: WorkerId) {
        if let Some(answers) = self.by_table.get_mut(table) {
            answers.retain(|answer| answer.worker != worker);
        }
    }

    fn restart(&mut self, table: usize) {
        if let Some(answers) = self.by_table.get_mut(table) {
            answers.clear();
        }
    }

    fn check(&self) -> Result<(), String> {
        for (table, answers) in self.by_table.iter().enumerate() {
            let mut workers: Vec<WorkerId> = answers.iter().map(|answer| answer.worker).collect();
            workers.sort_unstable();
            if workers.windows(2).any(|pair| pair[0] == pair[1]) {
                return Err(format!("table {table} has two early answers for one worker"));
            }
        }
        Ok(())
    }
}
