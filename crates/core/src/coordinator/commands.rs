//! Commands from outside the job: `paramill status`, `paramill set`. They are strangers, so there are few of them, and
//! one that is silent is hung up on: after a while, or at once when another one needs its place.

use crate::limits;
use crate::standstill::Standstill;
use crate::types::{NodeId, Time};
use crate::wire::Welcome;
use std::collections::{BTreeMap, BTreeSet};

/// The commands that are connected, by number, and when each was heard of last.
#[derive(Debug, Default)]
pub(super) struct Commands {
    last_heard: BTreeMap<u32, Time>,
    last_number: u32,
    /// Commands that made an epoch, and what they are told when it is settled.
    promises: Vec<Promise>,
    /// Commands that wait for a checkpoint.
    waiting: BTreeSet<u32>,
}

#[derive(Debug)]
struct Promise {
    number: u32,
    epoch: u32,
    sentence: String,
    /// It is answered at this time though the epoch is not settled.
    deadline: Time,
}

impl Commands {
    /// Lets a command in. Where there are as many as may be, the one that has been silent longest leaves, and is returned: a
    /// refusal would let those who ask again and again keep all others out.
    pub(super) fn accept(&mut self, now: Time) -> (Welcome, Option<u32>) {
        let is_full = self.last_heard.len() >= limits::MAX_COMMANDS;
        let silent = self.last_heard.iter().min_by_key(|(_, heard)| **heard).map(|(number, _)| *number);
        let evicted = silent.filter(|_| is_full);
        if let Some(evicted) = evicted {
            self.last_heard.remove(&evicted);
        }
        self.last_number = self.last_number.wrapping_add(1);
        self.last_heard.insert(self.last_number, now);
        (Welcome { you: NodeId::Admin(self.last_number), incarnation: 0, session: 0 }, evicted)
    }

    pub(super) fn heard(&mut self, now: Time, number: u32) {
        if let Some(last_heard) = self.last_heard.get_mut(&number) {
            *last_heard = now;
        }
    }

    /// A command waits for something that may take long: it is not its turn to speak.
    pub(super) fn wait(&mut self, number: u32) {
        self.waiting.insert(number);
    }

    /// A command has its answer.
    pub(super) fn answered(&mut self, now: Time, number: u32) {
        self.waiting.remove(&number);
        self.heard(now, number);
    }

    pub(super) fn lose(&mut self, number: u32) {
        self.waiting.remove(&number);
        self.last_heard.remove(&number);
        self.promises.retain(|promise| promise.number != number);
    }

    /// A command is told this when its epoch is settled, and something else if that takes too long.
    pub(super) fn promise(&mut self, now: Time, number: u32, epoch: u32, sentence: String) {
        let deadline = now + limits::SETTLE_DEADLINE;
        self.promises.push(Promise { number, epoch, sentence, deadline });
    }

    /// The next command whose epoch is not settled in time, and that epoch.
    pub(super) fn poll_unsettled(&mut self, now: Time) -> Option<(u32, u32)> {
        let at = self.promises.iter().position(|promise| promise.deadline <= now)?;
        let Promise { number, epoch, .. } = self.promises.remove(at);
        Some((number, epoch))
    }

    /// Whether a command waits for an answer: it is not its turn to speak.
    fn is_promised(&self, number: u32) -> bool {
        self.waiting.contains(&number) || self.promises.iter().any(|promise| promise.number == number)
    }

    /// The next command whose epoch is settled, and what it is told.
    pub(super) fn poll_due(&mut self, settled: u32) -> Option<(u32, String)> {
        let at = self.promises.iter().position(|promise| promise.epoch <= settled)?;
        let Promise { number, sentence, .. } = self.promises.remove(at);
        Some((number, sentence))
    }

    pub(super) fn last_heard_mut(&mut self) -> impl Iterator<Item = &mut Time> {
        self.last_heard.values_mut()
    }

    /// The next command that has said nothing for too long, though it was its turn. It counts no more.
    pub(super) fn poll_idle(&mut self, now: Time, standstill: &Standstill) -> Option<u32> {
        let is_idle = |(number, heard): &(&u32, &Time)| {
            standstill.deadline(**heard, limits::COMMAND_IDLE) <= now && !self.is_promised(**number)
        };
        let number = self.last_heard.iter().find(is_idle).map(|(number, _)| *number)?;
        self.last_heard.remove(&number);
        Some(number)
    }

    pub(super) fn next_timeout(&self, standstill: &Standstill) -> Option<Time> {
        let speakers = self.last_heard.iter().filter(|(number, _)| !self.is_promised(**number));
        let idle = speakers.map(|(_, heard)| standstill.deadline(*heard, limits::COMMAND_IDLE));
        idle.chain(self.promises.iter().map(|promise| promise.deadline)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u32) -> Time {
        Time::from_secs_f64(f64::from(seconds))
    }

    #[test]
    fn where_there_are_too_many_the_one_that_is_silent_longest_leaves() {
        let mut commands = Commands::default();
        for number in 1..=limits::MAX_COMMANDS as u32 {
            let (welcome, evicted) = commands.accept(seconds(number));
            assert_eq!((welcome.you, evicted), (NodeId::Admin(number), None));
        }
        commands.heard(seconds(100), 1);
        assert_eq!(commands.accept(seconds(100)).1, Some(2));
        assert_eq!(commands.accept(seconds(100)).1, Some(3));
        commands.lose(4);
        assert_eq!(commands.accept(seconds(100)).1, None);
    }

    #[test]
    fn a_command_that_says_nothing_is_hung_up_on() {
        let (mut commands, standstill) = (Commands::default(), Standstill::default());
        assert_eq!(
            (commands.next_timeout(&standstill), commands.poll_idle(seconds(9), &standstill)),
            (None, None)
        );
        (0..2).for_each(|at| _ = commands.accept(seconds(at)));
        let idle = seconds(0) + limits::COMMAND_IDLE;
        assert_eq!(commands.next_timeout(&standstill), Some(idle));
        assert_eq!(commands.poll_idle(Time(idle.0 - 1), &standstill), None);
        commands.heard(seconds(5), 1);
        assert_eq!(commands.poll_idle(idle, &standstill), None, "it said something");
        assert_eq!(commands.poll_idle(seconds(11), &standstill), Some(2));
        assert_eq!(commands.poll_idle(seconds(11), &standstill), None);
    }

    #[test]
    fn a_command_is_told_when_its_epoch_is_settled() {
        let mut commands = Commands::default();
        for (number, epoch) in [(1, 3), (2, 5), (3, 4)] {
            commands.promise(Time::ZERO, number, epoch, format!("epoch {epoch}"));
        }
        assert_eq!(commands.poll_due(2), None);
        commands.lose(3);
        assert_eq!([commands.poll_due(4), commands.poll_due(4)], [Some((1, "epoch 3".into())), None]);
        assert_eq!(commands.poll_due(5), Some((2, "epoch 5".into())));
    }

    #[test]
    fn a_command_that_waits_for_an_answer_is_not_idle_and_gets_one_in_time() {
        let (mut commands, standstill) = (Commands::default(), Standstill::default());
        commands.accept(seconds(0));
        commands.promise(seconds(7), 1, 3, "epoch 3".into());
        let due = seconds(7) + limits::SETTLE_DEADLINE;
        assert_eq!(commands.next_timeout(&standstill), Some(due));
        assert_eq!(commands.poll_idle(seconds(11), &standstill), None);
        assert_eq!(
            (commands.poll_unsettled(Time(due.0 - 1)), commands.poll_unsettled(due)),
            (None, Some((1, 3)))
        );
        assert_eq!((commands.poll_unsettled(due), commands.poll_due(3)), (None, None), "it has its answer");
        assert_eq!(commands.poll_idle(due, &standstill), Some(1), "it is its turn again");
    }
}
