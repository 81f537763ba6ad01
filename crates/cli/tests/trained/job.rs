//! A training job as processes, whose words are read while it runs.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::Duration;

pub(crate) const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");
/// How long a test waits for something that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn paramill(arguments: &[&str]) -> Output {
    Command::new(PARAMILL).args(arguments).output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A fault that makes every step of worker 0 take so long on any machine, and those of the others hardly any time.
pub(crate) fn slow_steps(folder: &Path, seconds: f64) -> String {
    let trace = folder.join("steps.csv");
    std::fs::write(&trace, format!("worker,step,seconds\n0,0,{seconds}\n1,0,0\n2,0,0\n")).unwrap();
    format!("trace={}", trace.display())
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

/// A training job whose words are read while it runs.
pub(crate) struct Training {
    child: Child,
    words: BufReader<ChildStderr>,
    pub(crate) url: String,
    said: String,
}

impl Training {
    pub(crate) fn start(arguments: &[&str]) -> Training {
        let mut child = Command::new(PARAMILL)
            .args(["train", "mlp", "--processes", "--json"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let words = BufReader::new(child.stderr.take().unwrap());
        let mut training = Training { child, words, url: String::new(), said: String::new() };
        let line = training.hear("the job is at ");
        training.url = line.split_whitespace().last().unwrap().to_owned();
        training
    }

    /// Reads on until it says this; the line.
    pub(crate) fn hear(&mut self, what: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.words.read_line(&mut line).unwrap() > 0, "it ended without `{what}`: {}", self.said);
            self.said += &line;
            if line.contains(what) {
                return line;
            }
        }
    }

    pub(crate) fn status(&self) -> Value {
        let output = paramill(&["status", &self.url, "--json"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The process of a server.
    pub(crate) fn server(&self, index: u32) -> u32 {
        self.child_with("cmdline", &[b"--index", index.to_string().as_bytes()])
            .expect("the server has a process")
    }

    /// The child whose file in `/proc` has these strings after each other.
    pub(crate) fn child_with(&self, file: &str, strings: &[&[u8]]) -> Option<u32> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let lists =
            threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("children")).ok());
        let children: String = lists.collect();
        let has = |pid: &u32| {
            let content = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            let found: Vec<&[u8]> = content.split(|byte| *byte == 0).collect();
            found.windows(strings.len()).any(|window| window == strings)
        };
        children.split_whitespace().map(|pid| pid.parse().unwrap()).find(has)
    }

    /// Its exit code, its report, and all it said.
    pub(crate) fn end(mut self) -> (Option<i32>, Value, String) {
        self.words.read_to_string(&mut self.said).unwrap();
        let output = self.child.wait_with_output().unwrap();
        (output.status.code(), serde_json::from_slice(&output.stdout).unwrap_or_default(), self.said)
    }
}
