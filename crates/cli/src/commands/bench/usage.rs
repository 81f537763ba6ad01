//! What processes took, in Linux's own books.

use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::fs;

/// Ticks of `/proc/PID/stat` in a second. It is 100 on every platform that Linux promises it for.
const TICKS_PER_SECOND: f64 = 100.0;

/// Seconds that the threads of a process have computed. `wanted` chooses threads by their names.
pub(super) fn cpu_seconds(pid: u32, wanted: impl Fn(&str) -> bool) -> Result<f64> {
    let folder = format!("/proc/{pid}/task");
    let threads = fs::read_dir(&folder).with_context(|| format!("cannot read {folder}"))?;
    let mut total = 0.0;
    for thread in threads.flatten() {
        let read = |file: &str| fs::read_to_string(thread.path().join(file)).ok();
        // A thread that has ended meanwhile took next to nothing.
        let Some(name) = read("comm") else { continue };
        if wanted(name.trim_end()) {
            let precise = read("schedstat").and_then(|text| nanoseconds(&text));
            total += precise.or_else(|| ticks(&read("stat")?)).unwrap_or(0.0);
        }
    }
    Ok(total)
}

/// Memory of a process, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    /// The most that has been resident, memory that it shares included.
    pub(super) peak: u64,
    /// What it shares with others now.
    pub(super) shared: u64,
}

impl Memory {
    /// Of this process.
    pub(super) fn of(pid: u32) -> Result<Memory> {
        let file = format!("/proc/{pid}/status");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
        let peak = kilobytes(&text, "VmHWM:").with_context(|| format!("{file} has no VmHWM"))?;
        // Old kernels do not tell what is shared.
        let shared = kilobytes(&text, "RssShmem:").unwrap_or(0);
        Ok(Memory { peak: peak * 1024, shared: shared * 1024 })
    }
}

/// Bytes that the network of each process has received and sent; `None` if two of them share one.
pub(super) fn link_bytes(pids: &[u32]) -> Result<Option<Vec<[u64; 2]>>> {
    let mut networks = BTreeSet::new();
    for pid in pids {
        let link = format!("/proc/{pid}/ns/net");
        networks.insert(fs::read_link(&link).with_context(|| format!("cannot read {link}"))?);
    }
    if networks.len() < pids.len() {
        return Ok(None);
    }
    let bytes = |pid: &u32| {
        let file = format!("/proc/{pid}/net/dev");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
        Ok(device_bytes(&text))
    };
    pids.iter().map(bytes).collect::<Result<_>>().map(Some)
}

/// Of all devices but loopback: the first number is what was received, the ninth what was sent.
fn device_bytes(devices: &str) -> [u64; 2] {
    let mut sum = [0; 2];
    let devices = devices.lines().filter_map(|line| line.split_once(':'));
    for (_, counters) in devices.filter(|(name, _)| name.trim() != "lo") {
        let numbers: Vec<u64> = counters.split_whitespace().map_while(|number| number.parse().ok()).collect();
        for (sum, column) in sum.iter_mut().zip([0, 8]) {
            *sum += numbers.get(column).copied().unwrap_or(0);
        }
    }
    sum
}

fn kilobytes(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// `schedstat` begins with the nanoseconds on a core.
fn nanoseconds(schedstat: &str) -> Option<f64> {
    let nanoseconds: u64 = schedstat.split_whitespace().next()?.parse().ok()?;
    Some(nanoseconds as f64 / 1e9)
}

/// User and system time are fields 14 and 15; names, which may hold anything, end with the last parenthesis.
fn ticks(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some((user + system) as f64 / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_books_are_read() {
        assert_eq!(nanoseconds("1500000000 17 3\n"), Some(1.5));
        assert_eq!(ticks("7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 120 30 0 0 20 0\n"), Some(1.5));
        assert_eq!(ticks("nonsense"), None);
        assert_eq!(kilobytes("VmPeak:\t 9 kB\nVmHWM:\t  17 kB\n", "VmHWM:"), Some(17));
    }

    #[test]
    fn loopback_is_no_link() {
        let text = "Inter-|   Receive\n face |bytes packets\n    lo: 7 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n  \
                    eth0: 100 1 0 0 0 0 0 0 30 1 0 0 0 0 0 0\n eth1:5 1 0 0 0 0 0 0 6 1 0 0 0 0 0 0\n";
        assert_eq!(device_bytes(text), [105, 36]);
        let me = std::process::id();
        assert_eq!(link_bytes(&[me]).unwrap().map(|bytes| bytes.len()), Some(1));
        assert_eq!(link_bytes(&[me, me]).unwrap(), None);
    }

    #[test]
    fn a_process_that_computes_takes_time_and_memory() {
        let me = std::process::id();
        let before = cpu_seconds(me, |_| true).unwrap();
        let mut x = 1u64;
        while cpu_seconds(me, |_| true).unwrap() <= before {
            (0..1_000_000).for_each(|_| x = std::hint::black_box(x.rotate_left(1)));
        }
        assert_eq!(cpu_seconds(me, |name| name == "no thread of ours").unwrap(), 0.0);
        assert!(Memory::of(me).unwrap().peak > 100_000);
    }
}
