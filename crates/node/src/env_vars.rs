//! Every environment variable that Paramill reads or sets. Explicit arguments always win over these.

/// The job's URL; set by `paramill launch` for the commands it starts.
pub const URL: &str = "PARAMILL_URL";
/// The worker's rank; set by `paramill launch`.
pub const RANK: &str = "PARAMILL_RANK";
/// The number of workers in the job; set by `paramill launch`.
pub const WORKERS: &str = "PARAMILL_WORKERS";
/// How the worker may reach the servers: auto, tcp or shm; set by `paramill launch --transport`.
pub const TRANSPORT: &str = "PARAMILL_TRANSPORT";
