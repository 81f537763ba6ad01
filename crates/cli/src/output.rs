//! How results reach people and programs.
//!
//! Results go to stdout: tables and sentences for people, one JSON object with `--json`. Everything about the way
//! there goes to stderr: bars on a terminal, plain lines otherwise, nothing with `--quiet`.

mod progress;
mod table;

pub(crate) use progress::Progress;
pub(crate) use table::{Align, Table};

use paramill_node::stderr;
use serde::Serialize;
use std::io::{self, IsTerminal, Write};

/// Causes of waiting time that are printed; JSON has all.
pub(crate) const WAIT_CAUSES: usize = 5;

/// Where and how to write.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    json: bool,
    quiet: bool,
}

impl Output {
    /// What `--json` and `--quiet` said.
    pub(crate) fn new(json: bool, quiet: bool) -> Output {
        Output { json, quiet }
    }

    /// Whether the result is to be one JSON object.
    pub(crate) fn json(&self) -> bool {
        self.json
    }

    /// The result for a program.
    pub(crate) fn object(&self, object: &impl Serialize) -> io::Result<()> {
        let text = serde_json::to_string_pretty(object)?;
        writeln!(io::stdout().lock(), "{text}")
    }

    /// One of several objects for a program, on a line of its own.
    pub(crate) fn line(&self, object: &impl Serialize) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{}", serde_json::to_string(object)?)?;
        stdout.flush()
    }

    /// A part of the result for a person.
    pub(crate) fn text(&self, text: impl AsRef<str>) -> io::Result<()> {
        let text = text.as_ref();
        let end = if text.is_empty() || !text.ends_with('\n') { "\n" } else { "" };
        write!(io::stdout().lock(), "{text}{end}")
    }

    /// A table for a person.
    pub(crate) fn table(&self, table: &Table) -> io::Result<()> {
        let stdout = io::stdout();
        let rendered =
            if stdout.is_terminal() { table.wrapped(terminal_width(&stdout)) } else { table.plain() };
        self.text(rendered)
    }

    /// A line about the way there.
    pub(crate) fn note(&self, line: impl AsRef<str>) {
        if !self.quiet {
            stderr::line(line.as_ref());
        }
    }

    /// Shows how far something with `steps` steps is.
    pub(crate) fn progress(&self, steps: u64) -> Progress {
        match (self.quiet, io::stderr().is_terminal()) {
            (true, _) => Progress::silent(),
            (false, true) => Progress::bar(steps),
            (false, false) => Progress::lines(steps),
        }
    }
}

/// Columns of the terminal; 80 when it does not say.
fn terminal_width(terminal: &io::Stdout) -> u16 {
    match rustix::termios::tcgetwinsize(terminal) {
        Ok(size) if size.ws_col > 0 => size.ws_col,
        _ => 80,
    }
}

/// A number of things as people say it: `1 worker`, `2 workers`.
pub(crate) fn count(number: u32, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// A number of bytes as people say it: `3.2 GiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let (mut value, mut unit) = (count as f64 / 1024.0, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn bytes_as_people_say_them() {
        for (count, text) in [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")] {
            assert_eq!(bytes(count), text);
        }
        assert_eq!(bytes(u64::MAX), "16384.0 PiB");
    }
}
