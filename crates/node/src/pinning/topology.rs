//! NUMA nodes and the CPUs of each, from the files in which Linux says so.

use rustix::thread::CpuSet;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The CPUs that may be used, by NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Topology {
    /// Number of the node, and its CPUs in the order in which they are best used.
    nodes: Vec<(usize, Vec<usize>)>,
}

impl Topology {
    /// Reads `node/node*/cpulist` and `cpu/cpu*/topology/thread_siblings_list` below `system`. Where nothing can be
    /// read there is one node and every CPU is a core of its own.
    pub(super) fn read(system: &Path, allowed: &BTreeSet<usize>) -> Topology {
        let mut nodes: Vec<(usize, Vec<usize>)> = node_numbers(&system.join("node"))
            .into_iter()
            .filter_map(|node| Some((node, list(&system.join(format!("node/node{node}/cpulist")))?)))
            .collect();
        for (_, cpus) in &mut nodes {
            cpus.retain(|cpu| allowed.contains(cpu));
        }
        nodes.retain(|(_, cpus)| !cpus.is_empty());
        let found: usize = nodes.iter().map(|(_, cpus)| cpus.len()).sum();
        if found != allowed.len() {
            nodes = vec![(0, allowed.iter().copied().collect())];
        }
        for (_, cpus) in &mut nodes {
            // Two threads of one core share its caches and its units: the second is used when no core is left.
            cpus.sort_by_key(|cpu| (is_second_thread(system, *cpu, allowed), *cpu));
        }
        Topology { nodes }
    }

    /// How many nodes there are.
    pub(super) fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Every CPU with its node, taking turns between nodes.
    pub(super) fn spread(&self) -> Vec<(usize, usize)> {
        let longest = self.nodes.iter().map(|(_, cpus)| cpus.len()).max().unwrap_or(0);
        let turn =
            |turn: usize| self.nodes.iter().filter_map(move |(node, cpus)| Some((*cpus.get(turn)?, *node)));
        (0..longest).flat_map(turn).collect()
    }

    #[cfg(test)]
    pub(super) fn of(nodes: &[&[usize]]) -> Topology {
        Topology { nodes: nodes.iter().map(|cpus| cpus.to_vec()).enumerate().collect() }
    }
}

/// A list as the kernel writes it: `0-3,8`. `None` for anything else.
pub(super) fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for item in text.split(',') {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= CpuSet::MAX_CPU {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

fn list(path: &Path) -> Option<Vec<usize>> {
    parse_list(fs::read_to_string(path).ok()?.trim())
}

fn node_numbers(folder: &Path) -> BTreeSet<usize> {
    let Ok(entries) = fs::read_dir(folder) else { return BTreeSet::new() };
    let number = |name: &str| name.strip_prefix("node")?.parse().ok();
    entries.flatten().filter_map(|entry| number(entry.file_name().to_str()?)).collect()
}

fn is_second_thread(system: &Path, cpu: usize, allowed: &BTreeSet<usize>) -> bool {
    let siblings = list(&system.join(format!("cpu/cpu{cpu}/topology/thread_siblings_list")));
    siblings.is_some_and(|siblings| siblings.iter().any(|other| *other < cpu && allowed.contains(other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().expect("in a folder")).expect("a folder");
        fs::write(path, text).expect("a file");
    }

    #[test]
    fn nodes_and_threads_are_read() {
        let root = tempfile::tempdir().expect("a folder");
        write(root.path(), "node/node0/cpulist", "0-1,4-5\n");
        write(root.path(), "node/node1/cpulist", "2-3,6-7\n");
        // A node with memory and no CPU, and a file that is no node.
        write(root.path(), "node/node2/cpulist", "\n");
        write(root.path(), "node/online", "0-2\n");
        for (cpu, siblings) in (0..8).map(|cpu| (cpu, format!("{},{}\n", cpu % 4, cpu % 4 + 4))) {
            write(root.path(), &format!("cpu/cpu{cpu}/topology/thread_siblings_list"), &siblings);
        }
        let topology = Topology::read(root.path(), &(0..8).collect());
        assert_eq!(topology.nodes(), 2);
        let cpus: Vec<usize> = topology.spread().into_iter().map(|(cpu, _)| cpu).collect();
        assert_eq!(cpus, [0, 2, 1, 3, 4, 6, 5, 7]);
        // A process that may use some of them only.
        let topology = Topology::read(root.path(), &BTreeSet::from([1, 5, 7]));
        assert_eq!(topology.spread(), [(1, 0), (7, 1), (5, 0)]);
    }

    #[test]
    fn without_the_files_there_is_one_node() {
        let root = tempfile::tempdir().expect("a folder");
        let allowed = BTreeSet::from([0, 1, 5]);
        assert_eq!(Topology::read(root.path(), &allowed).spread(), [(0, 0), (1, 0), (5, 0)]);
        // Files that leave a CPU out are not believed.
        write(root.path(), "node/node0/cpulist", "0-1\n");
        assert_eq!(Topology::read(root.path(), &allowed).nodes(), 1);
        assert_eq!(Topology::read(root.path(), &allowed).spread().len(), 3);
        write(root.path(), "node/node0/cpulist", "nonsense");
        assert_eq!(Topology::read(root.path(), &allowed).spread().len(), 3);
    }
}
