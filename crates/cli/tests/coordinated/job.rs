#![allow(dead_code, reason = "not every test that is built with this uses all of it")]
//! A job whose coordinator is a process of its own, whose servers are processes, and whose workers are threads of the test.

use paramill_core::status::Status;
use paramill_core::table::TableSpec;
use paramill_node::admin::{Admin, AdminError};
use paramill_node::client::{Job, JobOptions};
use paramill_node::url::JobUrl;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");
const WORKERS: u32 = 2;
const ELEMENTS: usize = 1000;
/// Longer than anything here takes on a machine that has much else to do.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that is ended with the test.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(arguments: &[&str]) -> Process {
        let mut command = Command::new(PARAMILL);
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::null());
        Process(command.spawn().expect("the binary was built for this test"))
    }

    /// Its first line, once it has said it.
    pub(crate) fn first_line(&mut self) -> String {
        let mut line = String::new();
        BufReader::new(self.0.stdout.take().expect("stdout is piped")).read_line(&mut line).unwrap();
        line
    }

    pub(crate) fn kill(mut self) {
        let pid = Pid::from_raw(self.0.id() as i32).expect("it was started");
        kill_process(pid, Signal::KILL).unwrap();
        self.0.wait().unwrap();
    }

    /// Has it stand still for so long.
    pub(crate) fn pause(&self, length: Duration) {
        let pid = Pid::from_raw(self.0.id() as i32).expect("it was started");
        kill_process(pid, Signal::STOP).unwrap();
        std::thread::sleep(length);
        kill_process(pid, Signal::CONT).unwrap();
    }

    /// Its exit code.
    pub(crate) fn wait(mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("it did not end within {PATIENCE:?}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An address that was free a moment ago.
pub(crate) fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// Arguments of a coordinator at an address.
pub(crate) fn coordinate<'a>(address: &'a str, state: &'a str) -> Vec<&'a str> {
    let job = "coordinate --json --workers 2 --servers 2 --sync bsp --optimizer sgd:lr=1";
    job.split(' ').chain(["--listen", address, "--state", state]).collect()
}

/// How far the workers are, and whether they may end.
#[derive(Default)]
pub(crate) struct Progress {
    steps: [AtomicU32; WORKERS as usize],
    is_last: AtomicBool,
}

impl Progress {
    fn least(&self) -> u32 {
        self.steps.iter().map(|steps| steps.load(Ordering::Relaxed)).min().unwrap_or(0)
    }

    /// Waits until every worker has done some more steps.
    pub(crate) fn go_on(&self, steps: u32) {
        let (until, deadline) = (self.least() + steps, Instant::now() + PATIENCE);
        while self.least() < until {
            assert!(Instant::now() < deadline, "the workers stand still at step {}", self.least());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The job's restarts and phase, once its coordinator answers.
pub(crate) fn status(url: &JobUrl) -> (u32, String) {
    let status = wait_for(url, |_| true);
    (status.restarts, status.phase)
}

/// The job's status, once its coordinator answers and something is so.
pub(crate) fn wait_for(url: &JobUrl, is_so: impl Fn(&Status) -> bool) -> Status {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match ask(url) {
            Ok(status) if is_so(&status) => return status,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Whether the job's coordinator is there.
pub(crate) fn ask(url: &JobUrl) -> Result<Status, AdminError> {
    Admin::connect(url, Duration::from_secs(1)).and_then(|mut admin| admin.status())
}

/// Runs two servers and two workers while `disturb` does what it does, and keeps what that leaves until all have ended well.
pub(crate) fn run<T>(url: &str, disturb: impl FnOnce(&Progress) -> T) -> T {
    let servers = [0, 1].map(|_| Process::start(&["serve", "--join", url, "--cores", "1"]));
    let left = train(url, disturb);
    for server in servers {
        assert_eq!(server.wait(), Some(0));
    }
    left
}

/// Runs two workers while `disturb` does what it does. They count their steps, and find all of them in the parameters.
pub(crate) fn train<T>(url: &str, disturb: impl FnOnce(&Progress) -> T) -> T {
    let progress = Progress::default();
    let work = |rank: u32| {
        let options = JobOptions::at(url.parse().unwrap()).rank(rank).timeout(PATIENCE).log(|_, _| {});
        let job = Job::init(options).unwrap();
        let table = job.table(TableSpec::dense("w", [ELEMENTS as u64]), vec![0.0; ELEMENTS]).unwrap();
        job.start().unwrap();
        let mut steps = 0;
        while !progress.is_last.load(Ordering::Relaxed) {
            table.update(&vec![1.0; ELEMENTS]).unwrap();
            job.clock();
            table.sync().unwrap();
            steps += 1;
            assert!(table.read(|values| values.iter().all(|value| *value == -(steps as f32))).unwrap());
            progress.steps[rank as usize].store(steps, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(2));
        }
        job.close().unwrap();
    };
    std::thread::scope(|scope| {
        let work = &work;
        let workers: Vec<_> = (0..WORKERS).map(|rank| scope.spawn(move || work(rank))).collect();
        progress.go_on(5);
        let left = disturb(&progress);
        progress.is_last.store(true, Ordering::Relaxed);
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        left
    })
}
