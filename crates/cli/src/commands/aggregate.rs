//! `paramill aggregate`: stands between the workers of a host or rack and the servers of a job.

use crate::args::AggregateArgs;
use crate::failure::{Failure, OrUsage};
use crate::listening;
use crate::output::Output;
use crate::plan::check_rate_of_node;
use crate::training::{self, AggregatorAnnouncement};
use anyhow::anyhow;
use paramill_core::limits;
use paramill_core::registry::Registry;
use paramill_core::types::AggregatorId;
use paramill_node::aggregator::{self, AggregatorConfig};
use paramill_node::env_vars;
use paramill_node::url::JobUrl;
use std::io::Write;
use std::sync::Arc;

pub(crate) fn run(args: &AggregateArgs, registry: &Arc<Registry>, output: &Output) -> Result<(), Failure> {
    if args.end_with_parent {
        training::end_with_parent()?;
    }
    let url: JobUrl = args.job.parse().or_usage()?;
    if args.hold.0 > limits::MAX_HOLD {
        let longest = limits::MAX_HOLD.as_secs();
        return Err(Failure::Usage(anyhow!("hold = {}: expected at most {longest}s", args.hold)));
    }
    check_rate_of_node(args.rate, args.transport.unwrap_or_default()).or_usage()?;
    let listen = listening::address(args.listen.as_deref(), args.host.as_deref(), listening::AGGREGATOR_PORT);
    let config = AggregatorConfig {
        id: args.index.map(AggregatorId),
        cores: args.cores,
        above: args.through.clone(),
        hold: args.hold.0,
        transport: args.transport.unwrap_or_default(),
        rate: args.rate,
        congestion: args.congestion.clone().or_else(|| std::env::var(env_vars::CONGESTION).ok()),
        faults: training::faults(&args.inject).or_usage()?,
        seed: args.seed,
        ..AggregatorConfig::new(&url.job, &url.address, &listen)
    };
    let aggregator = aggregator::start(config, registry)?;
    let address = aggregator.address().to_owned();
    announce(&AggregatorAnnouncement { url: url.to_string(), address }, &listen, output)?;
    Ok(aggregator.join().map_err(|error| anyhow!(error))?)
}

/// Says where workers come in.
fn announce(announcement: &AggregatorAnnouncement, listen: &str, output: &Output) -> Result<(), Failure> {
    if output.json() {
        return Ok(output.line(announcement)?);
    }
    let AggregatorAnnouncement { url, address } = announcement;
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "joining {url}; workers come in at {address}")?;
    writeln!(stdout, "a worker goes through it with {}={address} in its environment", env_vars::AGGREGATOR)?;
    writeln!(stdout, "{}", listening::who_can_connect([listen]))?;
    Ok(stdout.flush()?)
}
