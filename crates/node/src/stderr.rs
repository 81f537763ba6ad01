//! Lines for whoever watches a job: the one way in which Paramill writes to stderr.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt;
use std::io::{Stderr, Write};

/// As much as a pipe that is ready takes without blocking (PIPE_BUF).
const PIECE_BYTES: usize = 4096;
/// How long a line waits for a reader. An event loop that writes one stands still for as long.
const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Writes a line to stderr. `eprintln!` panics when its reader is gone or its disk full, and waits for ever when its reader
/// sleeps or its terminal is stopped. A job must not end or stand still by that: the line is lost, and the job goes on.
pub fn line(text: impl fmt::Display) {
    let mut stderr = std::io::stderr();
    // One write for the whole line, so that those of several threads and processes do not mix.
    for piece in format!("{text}\n").as_bytes().chunks(PIECE_BYTES) {
        if !takes_more(&stderr) || stderr.write_all(piece).is_err() {
            return;
        }
    }
}

fn takes_more(stderr: &Stderr) -> bool {
    let mut watched = [PollFd::new(stderr, PollFlags::OUT)];
    // What cannot be watched is written to as it is.
    poll(&mut watched, Some(&PATIENCE)).map_or(true, |ready| ready > 0)
}
