//! Every environment variable that Paramill reads or sets. Explicit arguments always win over these.

/// The job's URL; set by `paramill launch` for the commands it starts.
pub const URL: &str = "PARAMILL_URL";
/// The worker's rank; set by `paramill launch`.
pub const RANK: &str = "PARAMILL_RANK";
/// The addresses of the aggregator that the worker goes through, with `+` between its cores; set by `paramill launch --aggregators`.
pub const AGGREGATOR: &str = "PARAMILL_AGGREGATOR";
/// TCP's congestion control of servers and workers, by name: `reno`, `cubic`, `bbr` or what else the system has.
pub const CONGESTION: &str = "PARAMILL_CONGESTION";
/// The number of workers in the job; set by `paramill launch`.
pub const WORKERS: &str = "PARAMILL_WORKERS";
/// How the worker may reach the servers: auto, tcp or shm; set by `paramill launch --transport`.
pub const TRANSPORT: &str = "PARAMILL_TRANSPORT";
/// Threads that a worker's connections are spread over, from 1 to 64; set by `paramill launch --loops`.
pub const LOOPS: &str = "PARAMILL_LOOPS";
/// The ports that a worker may listen on, where it passes on what is broadcast: `7100-7115`. Without it the system chooses one.
pub const PORTS: &str = "PARAMILL_PORTS";
/// What a worker sends at most, such as `800Mbit`; set by `paramill launch --rate`.
pub const RATE: &str = "PARAMILL_RATE";
/// Faults to try, with `;` between them; set by `paramill launch --inject`.
pub const INJECT: &str = "PARAMILL_INJECT";
/// Threads that OpenMP, and with it PyTorch and numpy, uses in a process; set by `paramill launch` to a worker's share of
/// the CPUs, unless it is set already.
pub const THREADS: &str = "OMP_NUM_THREADS";
/// The folder of a user's state, below which a coordinator keeps its own unless it is told otherwise.
pub const STATE_HOME: &str = "XDG_STATE_HOME";
/// The user's folder; `.local/state` in it where [`STATE_HOME`] is not set.
pub const HOME: &str = "HOME";
/// The etcd to start for the tests of coordinators that keep their state in one; set by `cargo xtask test --services`.
pub const TEST_ETCD: &str = "PARAMILL_TEST_ETCD";
/// The program with a store that speaks S3 for the tests of checkpoints there; set by `cargo xtask test --services`.
pub const TEST_S3: &str = "PARAMILL_TEST_S3";
