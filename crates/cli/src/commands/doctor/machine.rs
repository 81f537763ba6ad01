//! Cores, memory, kernel and limits. Most of it is read from the files in which Linux says so; where a file is
//! missing the check says that, and the rest goes on.

use super::Check;
use crate::output::bytes;
use rustix::process::{Resource, getrlimit};
use std::fs;
use std::time::Instant;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// All checks of the machine itself.
pub(super) fn examine() -> Vec<Check> {
    vec![cores(), memory(), kernel(), file_descriptors(), shared_memory(), huge_pages(), clock()]
}

fn cores() -> Check {
    let usable = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let present = fs::read_to_string("/proc/cpuinfo")
        .map_or(usable, |text| text.lines().filter(|line| line.starts_with("processor")).count());
    let nodes = numa_nodes();
    let limited = if usable < present {
        format!(" of {present} (a cgroup or affinity limits it)")
    } else {
        String::new()
    };
    let found =
        format!("{usable}{limited}, {} instructions, {nodes} NUMA node{}", vector_level(), plural(nodes));
    let check = match usable {
        1 => Check::warn(
            "cores",
            found,
            "servers and workers will take turns; two cores or more let them overlap",
        ),
        _ => Check::ok("cores", found),
    };
    check.figure(usable as f64, "cores")
}

/// The widest vector instructions that the kernels' variants are compiled for.
fn vector_level() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            return "AVX-512";
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            return "AVX2";
        }
        "SSE2"
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::env::consts::ARCH
}

fn numa_nodes() -> usize {
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok());
    let Ok(entries) = fs::read_dir("/sys/devices/system/node") else { return 1 };
    entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_node)).count().max(1)
}

fn memory() -> Check {
    let Ok(text) = fs::read_to_string("/proc/meminfo") else {
        return Check::warn(
            "memory",
            "unknown: /proc/meminfo cannot be read",
            "mount /proc to have it checked",
        );
    };
    let total = meminfo(&text, "MemTotal").unwrap_or(0);
    let mut available = meminfo(&text, "MemAvailable").unwrap_or(0);
    let mut found = format!("{} free of {}", bytes(available), bytes(total));
    if let Some(limit) = cgroup_limit().filter(|limit| *limit < total) {
        available = available.min(limit);
        found.push_str(&format!(", at most {} for this cgroup", bytes(limit)));
    }
    let check = if available < GIB {
        Check::warn(
            "memory",
            found,
            "a server needs its parameters, an accumulator and optimizer state at once; free some memory",
        )
    } else {
        Check::ok("memory", found)
    };
    check.figure(available as f64, "bytes")
}

/// A line of `/proc/meminfo` in bytes.
fn meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kilobytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// The memory that a container may use, in version 2 or 1 of cgroups; the word `max` is no number and no limit.
fn cgroup_limit() -> Option<u64> {
    ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        .iter()
        .find_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok())
}

fn kernel() -> Check {
    let Ok(release) = fs::read_to_string("/proc/sys/kernel/osrelease") else {
        return Check::fail(
            "kernel",
            format!("{}, not Linux", std::env::consts::OS),
            "run it on Linux: the data path is built on epoll",
        );
    };
    let release = release.trim();
    match version(release) {
        Some(version) if version < (4, 14) => {
            Check::warn("kernel", format!("Linux {release}"), "Linux 4.14 or later is what this is tested on")
        }
        _ => Check::ok("kernel", format!("Linux {release}")),
    }
}

/// `6.18.44-x` is `(6, 18)`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn file_descriptors() -> Check {
    let limit = getrlimit(Resource::Nofile);
    let (soft, hard) = (limit.current.unwrap_or(u64::MAX), limit.maximum.unwrap_or(u64::MAX));
    let words = |limit: u64| if limit == u64::MAX { "no limit".to_owned() } else { limit.to_string() };
    let found = format!("{} (hard limit: {})", words(soft), words(hard));
    let remedy =
        format!("a server holds a connection for each worker on each of its cores: ulimit -n {hard}");
    let check = match soft {
        0..256 => Check::fail("open files", found, remedy),
        256..1024 => Check::warn("open files", found, remedy),
        _ => Check::ok("open files", found),
    };
    check.figure(soft as f64, "files")
}

fn shared_memory() -> Check {
    let Ok(space) = rustix::fs::statvfs("/dev/shm") else {
        return Check::warn(
            "shared memory",
            "/dev/shm is not there",
            "mount a tmpfs on /dev/shm; without it local workers use TCP",
        );
    };
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    let found = format!("{} free in /dev/shm", bytes(free));
    let check = if free < 256 * MIB {
        Check::warn(
            "shared memory",
            found,
            "enlarge it: mount -o remount,size=2G /dev/shm, or docker run --shm-size=2g",
        )
    } else {
        Check::ok("shared memory", found)
    };
    check.figure(free as f64, "bytes")
}

fn huge_pages() -> Check {
    const FILE: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    let Ok(modes) = fs::read_to_string(FILE) else {
        return Check::ok("huge pages", "this kernel has no transparent ones; ordinary pages are used");
    };
    let mode = chosen(&modes).unwrap_or("unknown");
    let reserved = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| {
            text.lines().find_map(|line| line.strip_prefix("HugePages_Total:"))?.trim().parse::<u64>().ok()
        })
        .unwrap_or(0);
    let found = format!("transparent: {mode}, reserved: {reserved}");
    match mode {
        "never" => Check::warn(
            "huge pages",
            found,
            format!("large tables pay for page walks: echo madvise > {FILE}"),
        ),
        _ => Check::ok("huge pages", found),
    }
}

/// The word in brackets: `always [madvise] never`.
fn chosen(modes: &str) -> Option<&str> {
    modes.split_once('[')?.1.split_once(']').map(|(mode, _)| mode)
}

fn clock() -> Check {
    const FILE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let source = fs::read_to_string(FILE).unwrap_or_default();
    let source = if source.trim().is_empty() { "unknown source" } else { source.trim() };
    let (step, cost) = clock_step_and_cost();
    let found = format!("{source}, steps of {step} ns, {cost:.0} ns to read");
    let check = if cost > 500.0 {
        Check::warn(
            "clock",
            found,
            format!("reading it enters the kernel; if your machine allows: echo tsc > {FILE}"),
        )
    } else {
        Check::ok("clock", found)
    };
    check.figure(step as f64, "ns")
}

/// The smallest step seen, and the mean cost of a reading, in nanoseconds.
fn clock_step_and_cost() -> (u64, f64) {
    const READINGS: u32 = 20_000;
    let start = Instant::now();
    let (mut last, mut step) = (start, u64::MAX);
    for _ in 0..READINGS {
        let now = Instant::now();
        let passed = u64::try_from((now - last).as_nanos()).unwrap_or(u64::MAX);
        if passed > 0 {
            step = step.min(passed);
        }
        last = now;
    }
    (step, (last - start).as_nanos() as f64 / f64::from(READINGS))
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_is_read() {
        let text = "MemTotal:       49287356 kB\nMemFree:        100 kB\nMemAvailable:      2048 kB\n";
        assert_eq!(meminfo(text, "MemTotal"), Some(49_287_356 * 1024));
        assert_eq!(meminfo(text, "MemAvailable"), Some(2 * MIB));
        assert_eq!(meminfo(text, "Mem"), None);
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen("always"), None);
        assert_eq!(version("6.18.44-x"), Some((6, 18)));
        assert_eq!(version("nonsense"), None);
    }

    #[test]
    fn every_check_says_what_it_found_and_what_to_do() {
        for check in examine() {
            assert!(!check.found.is_empty(), "{check:?}");
            assert_eq!(check.remedy.is_some(), check.verdict != super::super::Verdict::Ok, "{check:?}");
        }
    }
}
