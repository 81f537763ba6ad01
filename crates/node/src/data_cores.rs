//! How many data cores a server gets when nobody says how many.

use crate::host;
use paramill_core::status::JobSize;

/// Every worker holds a connection, with a receive buffer of 256 KiB, to every data core of a server. More cores than
/// this many connections allow would cost more memory than they bring throughput.
const MAX_CONNECTIONS: u32 = 256;
/// More data cores than this have not been seen to help one server.
const MAX_DATA_CORES: u32 = 16;

/// A job's use of one host, as far as the server in question knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HostShare {
    /// Servers of the job on this host, the one in question included.
    servers: u32,
    /// Workers of the job on this host.
    local_workers: u32,
    /// Workers of the job, wherever they run.
    all_workers: u32,
}

impl HostShare {
    /// Of a job whose coordinator is at `address` (`host:port`). On loopback all its servers and workers share this host;
    /// elsewhere each server is taken to have a host for itself.
    fn of_job_at(address: &str, servers: u32, workers: u32) -> HostShare {
        if address.split(',').all(host::is_of_this_machine) {
            HostShare { servers, local_workers: workers, all_workers: workers }
        } else {
            HostShare { servers: 1, local_workers: 0, all_workers: workers }
        }
    }

    /// The number of data cores for each server on this host. Each worker keeps a CPU for its own thread, and workers and
    /// the system a quarter of all at least. Servers get the rest, but at least half of the CPUs: workers wait, or compute
    /// on another device, while servers add.
    fn data_cores_of(self, cpus: u32) -> u32 {
        let for_others = self.local_workers.max(cpus / 4).max(1);
        let for_servers = cpus.saturating_sub(for_others).max(cpus / 2);
        let by_connections = MAX_CONNECTIONS / self.all_workers.max(1);
        (for_servers / self.servers.max(1)).min(by_connections).clamp(1, MAX_DATA_CORES)
    }
}

/// The number of data cores for a server of a job whose coordinator is at `address`.
pub fn data_cores(address: &str, job: &JobSize) -> u32 {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let share = HostShare::of_job_at(address, job.servers, job.workers);
    share.data_cores_of(u32::try_from(cpus).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_share_what_workers_leave_but_get_at_least_half() {
        for (cpus, servers, workers, expected) in [
            (16, 1, 4, 12),
            (16, 2, 4, 6),
            (16, 1, 1, 12),
            (16, 1, 12, 8),
            (16, 1, 64, 4), // by the connections of 64 workers
            (8, 8, 8, 1),
            (2, 2, 4, 1),
            (1, 1, 1, 1),
            (128, 1, 4, 16),
        ] {
            let share = HostShare::of_job_at("127.0.0.1:7070", servers, workers);
            assert_eq!(
                share.data_cores_of(cpus),
                expected,
                "{cpus} CPUs, {servers} servers, {workers} workers"
            );
        }
    }

    #[test]
    fn a_server_with_a_host_of_its_own_leaves_a_quarter_to_the_system() {
        for (address, cpus, workers, expected) in
            [("10.0.0.1:7070", 8, 8, 6), ("0.0.0.0:7070", 1, 8, 1), ("node7:7070", 64, 4096, 1)]
        {
            assert_eq!(HostShare::of_job_at(address, 2, workers).data_cores_of(cpus), expected, "{address}");
        }
    }
}
