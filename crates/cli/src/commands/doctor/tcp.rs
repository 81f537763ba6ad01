//! What TCP does on this machine, measured over loopback.

use super::Check;
use crate::output::bytes;
use socket2::{Domain, Socket, Type};
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Each way of controlling congestion is measured this often, in turns, and its best run counts: what else runs on
/// the machine only ever makes a run slower.
const RUNS: usize = 3;
const RUN_FOR: Duration = Duration::from_millis(333);
const PATIENCE: Duration = Duration::from_secs(5);
/// Large enough that system calls do not limit it.
const BUFFER: usize = 4 << 20;
const SETTINGS: &str = "/proc/sys/net/ipv4/";

/// Buffers, and throughput under the default and under the other usual ways of controlling congestion.
pub(super) fn examine() -> Vec<Check> {
    vec![socket_buffers(), loopback()]
}

fn socket_buffers() -> Check {
    let largest = |name: &str| -> Option<u64> {
        let text = fs::read_to_string(format!("{SETTINGS}{name}")).ok()?;
        text.split_whitespace().nth(2)?.parse().ok()
    };
    let (Some(receive), Some(send)) = (largest("tcp_rmem"), largest("tcp_wmem")) else {
        return Check::ok("socket buffers", "unknown: this system does not say");
    };
    let found = format!("up to {} to receive, {} to send", bytes(receive), bytes(send));
    let check = if receive.min(send) < 1 << 20 {
        Check::warn(
            "socket buffers",
            found,
            "a fast link with latency needs more: sysctl -w net.ipv4.tcp_rmem='4096 131072 33554432' \
             net.ipv4.tcp_wmem='4096 65536 33554432'",
        )
    } else {
        Check::ok("socket buffers", found)
    };
    check.figure(receive.min(send) as f64, "bytes")
}

fn loopback() -> Check {
    let setting = |name: &str| fs::read_to_string(format!("{SETTINGS}{name}")).unwrap_or_default();
    let default = setting("tcp_congestion_control");
    let default = default.trim();
    let available = setting("tcp_available_congestion_control");
    if let Err(error) = connected(None) {
        let remedy = "the loopback interface must be up: ip link set lo up";
        return Check::fail("loopback TCP", format!("failed: {error}"), remedy);
    }
    let others = available.split_whitespace().filter(|name| *name != default);
    let mut measured: Vec<(&str, f64)> =
        std::iter::once(default).chain(others).map(|name| (name, 0.0)).collect();
    for _ in 0..RUNS {
        for (index, (name, best)) in measured.iter_mut().enumerate() {
            // An algorithm that this user may not choose stays at 0 and is left out.
            let chosen = (index > 0).then_some(*name);
            *best = throughput(chosen).unwrap_or(0.0).max(*best);
        }
    }
    measured.retain(|(name, best)| *name == default || *best > 0.0);
    verdict(&measured)
}

/// The first is the default.
fn verdict(measured: &[(&str, f64)]) -> Check {
    let list: Vec<String> =
        measured.iter().map(|(name, speed)| format!("{:.2} GB/s with {name}", speed / 1e9)).collect();
    let (default, speed) = measured[0];
    let (best, best_speed) =
        measured.iter().copied().fold(measured[0], |best, next| if next.1 > best.1 { next } else { best });
    let found = list.join(", ");
    let check = if best_speed > 1.5 * speed {
        Check::warn(
            "loopback TCP",
            found,
            format!(
                "{default} is the default and {best} is {:.1} times as fast between local processes: \
                 sysctl -w net.ipv4.tcp_congestion_control={best}",
                best_speed / speed
            ),
        )
    } else {
        Check::ok("loopback TCP", found)
    };
    check.figure(speed, "bytes/s")
}

/// Bytes per second through one loopback connection.
fn throughput(congestion: Option<&str>) -> io::Result<f64> {
    let (sender, mut receiver) = connected(congestion)?;
    let deadline = Instant::now() + RUN_FOR;
    let sending = thread::spawn(move || send_until(sender, deadline));
    let mut buffer = vec![0u8; BUFFER];
    let (start, mut total) = (Instant::now(), 0u64);
    loop {
        match receiver.read(&mut buffer)? {
            0 => break,
            count => total += count as u64,
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    sending.join().map_err(|_| io::Error::other("the sending thread died"))??;
    Ok(total as f64 / seconds)
}

fn send_until(mut sender: TcpStream, deadline: Instant) -> io::Result<()> {
    let buffer = vec![0u8; BUFFER];
    while Instant::now() < deadline {
        sender.write_all(&buffer)?;
    }
    sender.shutdown(Shutdown::Write)
}

fn connected(congestion: Option<&str>) -> io::Result<(TcpStream, TcpStream)> {
    let listener = std::net::TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    if let Some(name) = congestion {
        set_congestion(&socket, name)?;
    }
    socket.connect_timeout(&listener.local_addr()?.into(), PATIENCE)?;
    let (receiver, _) = listener.accept()?;
    receiver.set_read_timeout(Some(PATIENCE))?;
    Ok((socket.into(), receiver))
}

#[cfg(target_os = "linux")]
fn set_congestion(socket: &Socket, name: &str) -> io::Result<()> {
    socket.set_tcp_congestion(name.as_bytes())
}

#[cfg(not(target_os = "linux"))]
fn set_congestion(_socket: &Socket, _name: &str) -> io::Result<()> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn a_slow_default_is_a_warning_that_names_the_better_one() {
        let check = verdict(&[("bbr", 1e9), ("reno", 3e9), ("cubic", 2e9)]);
        assert_eq!(check.verdict, Verdict::Warn);
        assert!(check.remedy.unwrap().contains("reno is 3.0 times as fast"));
        assert_eq!(verdict(&[("cubic", 3e9), ("reno", 3.1e9)]).verdict, Verdict::Ok);
    }

    #[test]
    fn a_connection_carries_bytes_and_an_unknown_algorithm_is_an_error() {
        let (mut sender, mut receiver) = connected(None).unwrap();
        sender.write_all(b"chunk").unwrap();
        let mut buffer = [0; 5];
        receiver.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, b"chunk");
        assert!(connected(Some("no-such-thing")).is_err());
    }
}
