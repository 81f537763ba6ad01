//! Which CPU each data core runs on. A core that stays where it is finds its parameters in its own caches, and in the
//! memory of its own NUMA node: memory lies where it is first touched, so a core pins itself before it takes any.

mod topology;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::Path;
use std::str::FromStr;
use topology::Topology;

const SYSTEM: &str = "/sys/devices/system";

/// Whether data cores are pinned to CPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Pin {
    /// They are when this process may use more CPUs than it has data cores, so that there is one left for others.
    Auto,
    /// They are not; the system moves them about.
    #[default]
    Off,
    /// To these, in this order.
    Cpus(Vec<usize>),
}

/// A text that says nothing about pinning.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no choice of CPUs: expected `auto`, `off`, or numbers and ranges below {max}, as in `0-3,8`", max = CpuSet::MAX_CPU)]
pub struct PinError(String);

impl FromStr for Pin {
    type Err = PinError;

    fn from_str(text: &str) -> Result<Pin, PinError> {
        match text {
            "auto" => Ok(Pin::Auto),
            "off" => Ok(Pin::Off),
            list => match topology::parse_list(list) {
                Some(cpus) if !cpus.is_empty() => Ok(Pin::Cpus(cpus)),
                _ => Err(PinError(text.to_owned())),
            },
        }
    }
}

/// What was made of a choice: the CPU of each data core, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pinning {
    /// Empty when cores are not pinned.
    pub(crate) cpus: Vec<usize>,
    reason: String,
}

impl fmt::Display for Pinning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl Pinning {
    /// Decides for `cores` data cores. Servers of one machine that choose for themselves take different CPUs if
    /// their numbers differ.
    pub(crate) fn choose(pin: &Pin, cores: u32, server: u32) -> io::Result<Pinning> {
        match pin {
            Pin::Off => Ok(Pinning::none("pinning is off")),
            Pin::Cpus(cpus) => {
                let allowed = allowed_cpus()?;
                Pinning::as_told(cpus, cores, &allowed)
                    .map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))
            }
            Pin::Auto => {
                let Ok(allowed) = allowed_cpus() else {
                    return Ok(Pinning::none("this system does not say which CPUs may be used"));
                };
                // A container may be given less time than it sees CPUs.
                let usable = std::thread::available_parallelism().map_or(1, |cores| cores.get());
                let topology = Topology::read(Path::new(SYSTEM), &allowed);
                Ok(Pinning::automatic(cores, server, usable.min(allowed.len()), &topology))
            }
        }
    }

    fn none(why: &str) -> Pinning {
        Pinning { cpus: Vec::new(), reason: format!("data cores are not pinned: {why}") }
    }

    fn as_told(cpus: &[usize], cores: u32, allowed: &BTreeSet<usize>) -> Result<Pinning, String> {
        if cpus.len() < cores as usize {
            return Err(format!("{} CPUs to pin {cores} data cores to: give one for each", cpus.len()));
        }
        if let Some(cpu) = cpus.iter().find(|cpu| !allowed.contains(cpu)) {
            let list: Vec<usize> = allowed.iter().copied().collect();
            return Err(format!("this process may not use CPU {cpu}, only {}", words(&list)));
        }
        let cpus = cpus[..cores as usize].to_vec();
        let reason = format!("data cores are pinned to CPUs {}", words(&cpus));
        Ok(Pinning { cpus, reason })
    }

    fn automatic(cores: u32, server: u32, usable: usize, topology: &Topology) -> Pinning {
        let count = cores as usize;
        let spread = topology.spread();
        if usable <= count || spread.len() <= count {
            let usable = usable.min(spread.len());
            return Pinning::none(&format!("{count} of them, and {usable} CPUs to use"));
        }
        let first = server as usize * count;
        let chosen: Vec<(usize, usize)> =
            (0..count).map(|core| spread[(first + core) % spread.len()]).collect();
        let cpus: Vec<usize> = chosen.iter().map(|(cpu, _)| *cpu).collect();
        let nodes: BTreeSet<usize> = chosen.iter().map(|(_, node)| *node).collect();
        let on_nodes = match topology.nodes() {
            0 | 1 => String::new(),
            _ => format!(" on NUMA nodes {}", words(&nodes.into_iter().collect::<Vec<_>>())),
        };
        let reason = format!("data cores are pinned to CPUs {}{on_nodes}", words(&cpus));
        Pinning { cpus, reason }
    }
}

/// Keeps the calling thread on one CPU from now on.
pub(crate) fn pin_this_thread(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

fn allowed_cpus() -> io::Result<BTreeSet<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

fn words(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_read_or_refused_with_what_was_expected() {
        for (text, pin) in [
            ("auto", Pin::Auto),
            ("off", Pin::Off),
            ("3", Pin::Cpus(vec![3])),
            ("0-3,8", Pin::Cpus(vec![0, 1, 2, 3, 8])),
            ("5,1", Pin::Cpus(vec![5, 1])),
        ] {
            assert_eq!(text.parse(), Ok(pin), "{text}");
        }
        for text in ["", "on", "3-1", "0,", "-1", "0-99999999999", "1024"] {
            let error = text.parse::<Pin>().expect_err(text).to_string();
            assert!(error.contains("as in `0-3,8`"), "{error}");
        }
    }

    #[test]
    fn told_cpus_are_taken_in_order_if_there_are_enough_and_they_may_be_used() {
        let allowed = BTreeSet::from([0, 1, 4]);
        let pinning = Pinning::as_told(&[4, 0, 1], 2, &allowed).expect("two of three");
        assert_eq!(pinning.cpus, [4, 0]);
        assert_eq!(pinning.to_string(), "data cores are pinned to CPUs 4, 0");
        let why = Pinning::as_told(&[4], 2, &allowed).expect_err("one for two");
        assert!(why.contains("1 CPUs to pin 2 data cores to"), "{why}");
        let why = Pinning::as_told(&[0, 2], 2, &allowed).expect_err("not allowed");
        assert!(why.contains("may not use CPU 2, only 0, 1, 4"), "{why}");
    }

    #[test]
    fn automatic_pinning_leaves_a_cpu_to_others_and_spreads_over_nodes() {
        let topology = Topology::of(&[&[0, 1, 2, 3], &[4, 5, 6, 7]]);
        let pinning = Pinning::automatic(4, 0, 8, &topology);
        assert_eq!(pinning.cpus, [0, 4, 1, 5]);
        assert_eq!(pinning.to_string(), "data cores are pinned to CPUs 0, 4, 1, 5 on NUMA nodes 0, 1");
        // A second server on the machine.
        assert_eq!(Pinning::automatic(4, 1, 8, &topology).cpus, [2, 6, 3, 7]);
        // Sixteen CPUs in sight, time for four.
        let pinning = Pinning::automatic(4, 0, 4, &topology);
        assert!(pinning.cpus.is_empty());
        assert_eq!(pinning.to_string(), "data cores are not pinned: 4 of them, and 4 CPUs to use");
        assert!(Pinning::automatic(8, 0, 8, &topology).cpus.is_empty());
    }

    #[test]
    fn a_thread_stays_where_it_is_pinned() {
        let cpu = *allowed_cpus().expect("Linux tells").last().expect("this runs somewhere");
        std::thread::spawn(move || {
            pin_this_thread(cpu).expect("it is allowed");
            assert_eq!(allowed_cpus().expect("Linux tells"), BTreeSet::from([cpu]));
        })
        .join()
        .expect("the thread's assertions hold");
    }
}
