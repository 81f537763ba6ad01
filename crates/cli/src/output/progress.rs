//! How far a long command is, on stderr.

use indicatif::{ProgressBar, ProgressStyle};
use paramill_node::stderr;
use std::time::{Duration, Instant};

/// A line is written at most this often; a log that scrolls helps nobody.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// A bar, lines, or nothing. Dropping it removes the bar.
pub(crate) struct Progress {
    kind: Kind,
}

enum Kind {
    Silent,
    Bar(ProgressBar),
    Lines { steps: u64, last: Option<Instant> },
}

impl Progress {
    pub(super) fn silent() -> Progress {
        Progress { kind: Kind::Silent }
    }

    pub(super) fn bar(steps: u64) -> Progress {
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {wide_msg}")
            .expect("the template is a constant that a test builds");
        Progress { kind: Kind::Bar(ProgressBar::new(steps).with_style(style)) }
    }

    pub(super) fn lines(steps: u64) -> Progress {
        Progress { kind: Kind::Lines { steps, last: None } }
    }

    /// `done` steps are behind us; `what` is going on.
    pub(crate) fn set(&mut self, done: u64, what: &str) {
        match &mut self.kind {
            Kind::Silent => {}
            Kind::Bar(bar) => {
                bar.set_position(done);
                bar.set_message(what.to_owned());
            }
            Kind::Lines { steps, last } => {
                if last.is_none_or(|last| last.elapsed() >= LINE_EVERY) {
                    stderr::line(format_args!("{done}/{steps} {what}"));
                    *last = Some(Instant::now());
                }
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Kind::Bar(bar) = &self.kind {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_moves() {
        let mut progress = Progress::bar(4);
        progress.set(3, "three");
        let Kind::Bar(bar) = &progress.kind else { panic!("a bar was made") };
        assert_eq!((bar.position(), bar.message().as_str()), (3, "three"));
    }
}
