//! Servers as people start and ask them: where they listen when nobody says so, and what they and the commands around them say.

#![allow(clippy::unwrap_used, reason = "an unwrap that fails is a test that fails")]

use paramill_core::role::Body;
use paramill_core::wire::control::{decode, frame};
use paramill_core::wire::{HEADER_BYTES, Header, Hello, Kind, Party, Refusal, padded};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PARAMILL: &str = env!("CARGO_BIN_EXE_paramill");

fn paramill(arguments: &[&str]) -> Output {
    Command::new(PARAMILL).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A server that runs until the test is over, and the first lines that it printed.
struct Serve {
    child: Child,
    /// Open as long as the server runs: one that cannot say where it is has nobody to serve.
    _stdout: BufReader<ChildStdout>,
    lines: Vec<String>,
}

impl Serve {
    fn start(arguments: &[&str], lines: usize) -> Serve {
        let mut child = Command::new(PARAMILL)
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let lines = stdout.by_ref().lines().take(lines).map(Result::unwrap).collect();
        Serve { child, _stdout: stdout, lines }
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The port is taken, by this test or by whoever had it before: the refusal names the address that was meant.
#[test]
fn servers_and_aggregators_listen_on_this_machine_unless_they_are_told_otherwise() {
    let job = "127.0.0.1:1";
    for (arguments, address) in [
        (&["serve"][..], "127.0.0.1:7070"),
        (&["serve", "--host", "127.0.0.9"], "127.0.0.9:7070"),
        (&["aggregate", "--job", job, "--transport", "tcp"], "127.0.0.1:7071"),
        (&["aggregate", "--job", job, "--transport", "tcp", "--host", "127.0.0.9"], "127.0.0.9:7071"),
    ] {
        let _taken = TcpListener::bind(address);
        let output = paramill(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let told = text(&output.stderr);
        assert!(
            told.contains(&format!("error: {address} is in use by another program")),
            "{arguments:?}: {told}"
        );
    }
}

#[test]
fn data_cores_listen_on_the_ports_that_a_firewall_lets_through() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let first = taken.local_addr().unwrap().port();
    let common =
        ["serve", "--listen", "127.0.0.1:0", "--workers=1", "--servers=1", "--cores=2", "--transport=tcp"];
    let serve = |ports: &str| [&common[..], &["--ports", ports]].concat().join(" ");
    let refusal = |line: String| {
        let output = paramill(&line.split(' ').collect::<Vec<_>>());
        (output.status.code(), text(&output.stderr))
    };
    // The port that is taken is passed over; others of the range may be taken too.
    let line = serve(&format!("{first}-{}", first + 20));
    let serving = Serve::start(&line.split(' ').collect::<Vec<_>>(), 3);
    let data = serving.lines[2].strip_prefix("data cores listen on ").unwrap();
    let ports: Vec<u16> = data
        .split(", ")
        .map(|address| address.strip_prefix("127.0.0.1:").unwrap().parse().unwrap())
        .collect();
    assert!(
        ports.len() == 2 && first < ports[0] && ports[0] < ports[1] && ports[1] <= first + 20,
        "{ports:?}"
    );
    // What it holds, and what this test holds, leaves nothing of a range that ends there.
    let (code, why) = refusal(serve(&format!("{}-{}", ports[1] - 1, ports[1])));
    assert_eq!(code, Some(1), "{why}");
    assert!(why.contains("are too few: 2 data cores need one each"), "{why}");
    assert!(why.contains(&format!("{}; give more ports", ports[1])), "{why}");
    let (code, why) = refusal(serve(&format!("{first}")));
    assert_eq!(code, Some(1), "{why}");
    assert!(why.contains(&format!("ports {first} are 1, and 2 data cores need one each")), "{why}");
    let (code, why) = refusal(serve("20-10"));
    assert_eq!(code, Some(2), "{why}");
    assert!(why.contains("expected ports from 1 to 65535"), "{why}");
    let (code, why) = refusal(serve("7100-7101").replace("=tcp", "=shm"));
    assert_eq!(code, Some(2), "{why}");
    assert!(why.contains("data cores listen on no port then"), "{why}");
}

#[test]
fn a_server_says_who_can_connect() {
    let serve = Serve::start(&["serve", "--listen", "127.0.0.1:0", "--workers", "1", "--servers", "1"], 5);
    let who = &serve.lines[4];
    assert!(who.contains("only this machine can connect; --host ADDRESS (or 0.0.0.0"), "{:?}", serve.lines);
    assert!(who.contains("no authentication yet"), "{:?}", serve.lines);
}

#[test]
fn a_job_is_counted_in_words() {
    let serve = Serve::start(&["serve", "--listen", "127.0.0.1:0", "--workers", "1", "--servers", "2"], 1);
    assert!(serve.lines[0].starts_with("waits for 1 worker and 2 servers; "), "{:?}", serve.lines);
}

#[test]
fn status_takes_the_only_job_at_an_address() {
    let serve = Serve::start(&["serve", "--listen", "127.0.0.1:0", "--job", "run42"], 2);
    let url = serve.lines[1].strip_prefix("the job is at paramill://").unwrap();
    let address = url.strip_suffix("/run42").unwrap();
    let status = paramill(&["status", address]);
    assert!(text(&status.stdout).starts_with("job `run42`: waiting"), "{}", text(&status.stderr));
    let other = paramill(&["status", &format!("{address}/other")]);
    assert!(text(&other.stderr).contains("serves job `run42`, not `other`"), "{}", text(&other.stderr));
}

#[test]
fn a_further_server_says_that_the_job_is_not_there_yet() {
    let mut serve = Command::new(PARAMILL)
        .args(["serve", "--join", "127.0.0.1:1"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(serve.stderr.take().unwrap()).read_line(&mut line).unwrap();
    serve.kill().unwrap();
    serve.wait().unwrap();
    assert!(line.starts_with("no coordinator at 127.0.0.1:1 yet: Connection refused"), "{line}");
    assert!(line.contains("trying again for 30 s"), "{line}");
}

/// Such options were taken and had no effect.
#[test]
fn options_that_are_the_job_s_are_refused_elsewhere_and_heeded_in_its_config() {
    let joining = paramill(&["serve", "--join", "127.0.0.1:1", "--coordinator-grace", "5s"]);
    assert!(text(&joining.stderr).contains("--coordinator-grace with --join"), "{}", text(&joining.stderr));
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("job.toml");
    std::fs::write(&config, "[cluster]\nservers = 1\nreplicas = 1\n").unwrap();
    let config = config.to_str().unwrap();
    let alone = paramill(&["coordinate", "--listen", "127.0.0.1:0", "--config", config]);
    let why = text(&alone.stderr);
    assert!(why.contains("replicas = 1: copies are kept on other servers, and servers = 1"), "{why}");
}

/// A joining server did not know how many workers there are.
#[test]
fn a_further_server_asks_the_job_for_its_size() {
    let serve = Serve::start(&["serve", "--listen", "127.0.0.1:0", "--workers", "3"], 2);
    let url = serve.lines[1].strip_prefix("the job is at ").unwrap();
    let status = text(&paramill(&["status", url, "--json"]).stdout);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["size"], serde_json::json!({ "workers": 3, "servers": 2 }), "{status}");
}

#[test]
fn a_further_server_may_be_started_before_the_first() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let mut further = Command::new(PARAMILL)
        .args(["serve", "--join", &address])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(further.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("no coordinator at"), "{line}");
    let _first = Serve::start(&["serve", "--listen", &address], 1);
    line.clear();
    BufReader::new(further.stdout.take().unwrap()).read_line(&mut line).unwrap();
    further.kill().unwrap();
    further.wait().unwrap();
    assert!(line.starts_with(&format!("joining paramill://{address}")), "{line}");
}

/// Refuses data cores at once, and answers commands a byte a second.
fn refuse_data_cores(mut stream: TcpStream) -> std::io::Result<()> {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head)?;
    let mut payload = vec![0; padded(Header::decode(&head).unwrap().payload_bytes as usize)];
    stream.read_exact(&mut payload)?;
    let length = Header::decode(&head).unwrap().payload_bytes as usize;
    let hello: Hello = decode("hello", &payload[..length]).unwrap();
    let refusal = frame(Kind::Error, &Refusal { reason: "not you".into(), retry: false });
    let Body::Bytes(mut body) = refusal.body else { unreachable!("control frames carry bytes") };
    body.resize(padded(body.len()), 0);
    let bytes = [&refusal.header.encode()[..], &body].concat();
    if hello.from != Party::Command {
        stream.write_all(&bytes)?;
        return stream.read_exact(&mut [0]);
    }
    for byte in bytes {
        stream.write_all(&[byte])?;
        std::thread::sleep(Duration::from_secs(1));
    }
    Ok(())
}

/// A joining server asked how the job stands first, and told of its own failure when it had the answer.
#[test]
fn a_further_server_that_is_refused_says_so_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || refuse_data_cores(stream.unwrap()));
        }
    });
    let mut further = Command::new(PARAMILL)
        .args(["serve", "--join", &address, "--cores", "1"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A whole answer takes longer than this.
    let deadline = Instant::now() + Duration::from_secs(30);
    while further.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            further.kill().unwrap();
            panic!("it waits for the answer to another question");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut told = String::new();
    further.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert!(told.contains("not you"), "{told}");
}

#[test]
fn what_was_left_out_is_named() {
    let told = text(&paramill(&["launch", "-n", "2", "python", "x.py", "--epochs", "3"]).stderr);
    let advice = "put `--` before the command: paramill launch -n 2 -- python x.py --epochs 3";
    assert!(told.contains(advice), "{told}");
    let told = text(&paramill(&["set", "127.0.0.1:1"]).stderr);
    assert!(told.contains("<AXIS=TEXT>"), "{told}");
}
