//! Jobs over TCP on this host, for tests.

use paramill_core::coordinator::JobConfig;
use paramill_core::registry::Registry;
use paramill_node::client::{Job, JobOptions};
use paramill_node::server::{self, Server, ServerConfig};
use paramill_node::url::JobUrl;
use std::sync::Arc;
use std::time::Duration;

/// The servers of a job, each with so many data cores, and where it is.
pub(crate) fn start_servers(config: &JobConfig, cores: u32) -> (Vec<Server>, JobUrl) {
    let registry = Arc::new(Registry::builtin());
    let base = ServerConfig { cores, ..ServerConfig::new(&config.job, "127.0.0.1:0") };
    let first =
        server::start(ServerConfig { coordinate: Some(config.clone()), ..base.clone() }, &registry).unwrap();
    let coordinator = first.coordinator().to_owned();
    let url = format!("paramill://{coordinator}/{}", config.job).parse().unwrap();
    let further = ServerConfig { coordinator, ..base };
    let rest = (1..config.servers).map(|_| server::start(further.clone(), &registry).unwrap());
    ([first].into_iter().chain(rest).collect(), url)
}

/// A worker of that job.
pub(crate) fn join(url: &JobUrl, rank: u32) -> Job {
    Job::init(JobOptions::at(url.clone()).rank(rank).timeout(Duration::from_secs(20))).unwrap()
}
