//! One controller in virtual time, driven by lines of text as a server would drive it.

use paramill_core::consistency::{Admit, Advance, Controller, PullOutcome, SyncPolicy, axis};
use paramill_core::types::{Time, WorkerId};
use std::fmt::Write;

pub(crate) struct World {
    pub(crate) controller: Controller,
    now: Time,
    next_token: u64,
}

impl World {
    pub(crate) fn new(workers: u32, policy: &str) -> World {
        let policy = SyncPolicy::parse(&axis(), policy).unwrap_or_else(|error| panic!("{error}"));
        let controller = Controller::new(policy, (0..workers).map(WorkerId), 1);
        World { controller, now: Time::ZERO, next_token: 0 }
    }

    /// Carries out one command and says what came of it, a line each.
    pub(crate) fn run(&mut self, command: &str) -> String {
        let words: Vec<&str> = command.split_whitespace().collect();
        let mut out = format!("{command}:");
        match words[..] {
            ["push", worker, clock] => self.push(rank(worker), number(clock), None, &mut out),
            ["push", worker, clock, significance] => {
                let significance = significance.parse().expect("a significance");
                self.push(rank(worker), number(clock), Some(significance), &mut out);
            }
            ["pull", worker, clock] => self.pull(rank(worker), number(clock), &mut out),
            ["time", seconds] => {
                self.pass_time(Time::from_secs_f64(seconds.parse().expect("seconds")), &mut out);
            }
            ["set", ..] => {
                let text = command.trim_start_matches("set").trim();
                match SyncPolicy::parse(&axis(), text) {
                    Ok(policy) => {
                        let _ = write!(out, " {policy}");
                        self.controller.set_policy(self.now, policy);
                    }
                    Err(error) => {
                        let _ = write!(out, " refused: {error}");
                    }
                }
            }
            ["leave", worker] => self.controller.remove_worker(rank(worker), None),
            ["leave", worker, "during", clock] => {
                self.controller.remove_worker(rank(worker), Some(number(clock)));
            }
            ["join", worker] => {
                let _ = write!(out, " from clock {}", self.controller.join(rank(worker), false));
            }
            // Frames of the open round are here.
            ["join", worker, "begun"] => {
                let _ = write!(out, " from clock {}", self.controller.join(rank(worker), true));
            }
            ["join", worker, "from", clock] => {
                self.controller.join(rank(worker), false);
                self.controller.set_first_clock(rank(worker), number(clock));
            }
            ["disconnect", worker] => self.controller.cancel(rank(worker)),
            ["judge", "here"] => self.controller.set_judge(self.now, true),
            ["judge", "gone"] => self.controller.set_judge(self.now, false),
            ["verdict", question, holds] => {
                let holds = match holds {
                    "answer" => Some(true),
                    "wait" => Some(false),
                    "none" => None,
                    other => panic!("unknown verdict `{other}`"),
                };
                self.controller.verdict(self.now, number(question), holds);
            }
            ["state"] => self.state(&mut out),
            ["waiting"] => self.waiting(&mut out),
            ["stats"] => self.stats(&mut out),
            _ => panic!("unknown command `{command}`"),
        }
        self.settle(&mut out);
        out
    }

    fn push(&mut self, worker: WorkerId, clock: u64, significance: Option<f64>, out: &mut String) {
        let admit = self.controller.admit(worker, clock);
        let _ = match admit {
            Admit::Now => write!(out, " a step at once"),
            Admit::Round(round) => write!(out, " into round {round}"),
            Admit::Late => write!(out, " late, dropped"),
            Admit::Duplicate => write!(out, " duplicate, dropped"),
            Admit::TooFarAhead => write!(out, " refused, too far ahead"),
            Admit::UnknownWorker => write!(out, " refused, unknown worker"),
        };
        self.controller.push(self.now, worker, clock, admit, significance, 1);
    }

    fn pull(&mut self, worker: WorkerId, clock: u64, out: &mut String) {
        self.next_token += 1;
        let token = self.next_token;
        let _ = match self.controller.pull(self.now, worker, clock, token) {
            PullOutcome::Answer { staleness } => write!(out, " answered, lacks {staleness}"),
            PullOutcome::Wait => {
                let waiting = self.controller.waiting().find(|waiting| waiting.token == token);
                let until = waiting.expect("a pull that waits is listed").reason.until;
                write!(out, " waits for version {until}")
            }
        };
    }

    /// Time stops at every timeout on the way.
    fn pass_time(&mut self, until: Time, out: &mut String) {
        while let Some(timeout) = self.controller.next_timeout().filter(|&timeout| timeout <= until) {
            self.now = self.now.max(timeout);
            let _ = write!(out, "\n  timeout at {}", self.now.as_secs_f64());
            self.settle(out);
        }
        self.now = self.now.max(until);
    }

    fn settle(&mut self, out: &mut String) {
        while let Some(Advance { version, closed, contributions, weight, lr_factor, .. }) =
            self.controller.advance(self.now)
        {
            let _ = write!(out, "\n  version {closed} -> {version}, gradients {contributions}");
            if weight != contributions as f32 {
                let _ = write!(out, " of weight {weight}");
            }
            if lr_factor != 1.0 {
                let _ = write!(out, ", learning rate x {lr_factor}");
            }
        }
        while let Some(released) = self.controller.poll_released() {
            let _ = write!(out, "\n  w{} answered, lacks {}", released.worker.0, released.staleness);
        }
        while let Some(asked) = self.controller.poll_question() {
            let progress: Vec<i64> = asked.workers.iter().map(|known| known.progress).collect();
            let (number, condition, worker) = (asked.number, asked.condition, asked.worker.0);
            let _ = write!(out, "\n  question {number}, {condition}: w{worker} at {}", asked.progress);
            let _ = write!(out, " of {progress:?}, v_train {}", asked.v_train);
        }
    }

    fn state(&self, out: &mut String) {
        let state = self.controller.state();
        let progress: Vec<String> =
            state.workers().map(|(id, worker)| format!("w{}@{}", id.0, worker.progress())).collect();
        let _ = write!(out, " v_train {}, count {} of {}", state.v_train(), state.count(), state.n());
        let _ = write!(out, ", gradients {}", state.contributions());
        let _ = write!(
            out,
            ", progress {}",
            if progress.is_empty() { "of nobody".into() } else { progress.join(" ") }
        );
    }

    fn waiting(&self, out: &mut String) {
        for waiting in self.controller.waiting() {
            let since = waiting.since.as_secs_f64();
            let _ = write!(out, "\n  w{} since {since}: {}", waiting.worker.0, waiting.reason);
        }
    }

    fn stats(&self, out: &mut String) {
        let stats = self.controller.stats();
        let _ = write!(
            out,
            " pushes {}, dropped {}, duplicates {}, refused {}, advances {}",
            stats.pushes, stats.dropped, stats.duplicates, stats.refused, stats.advances
        );
        let _ = write!(
            out,
            "; pulls {}, dprs {}, released {}, staleness {:?}",
            stats.pulls, stats.dprs, stats.released, stats.staleness
        );
        if stats.questions + stats.fallbacks > 0 {
            let _ = write!(out, "; questions {}, fallbacks {}", stats.questions, stats.fallbacks);
        }
    }
}

fn rank(word: &str) -> WorkerId {
    WorkerId(word.strip_prefix('w').and_then(|rank| rank.parse().ok()).expect("a worker such as w0"))
}

fn number(word: &str) -> u64 {
    word.parse().expect("a whole number")
}
