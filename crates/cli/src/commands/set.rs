//! `paramill set`: changes a policy of a running job.

use crate::args::SetArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use paramill_core::consistency::SyncPolicy;
use paramill_core::registry::Registry;
use paramill_core::types::ServerId;
use paramill_node::admin::Admin;
use serde::Serialize;
use std::time::Duration;

/// How long the coordinator may take for an answer.
const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Serialize)]
struct Changed {
    done: String,
}

pub(crate) fn run(args: &SetArgs, registry: &Registry, output: &Output) -> Result<(), Failure> {
    let url = args.url.parse().or_usage()?;
    SyncPolicy::parse(&registry.consistency, &args.sync).or_usage()?;
    let done =
        Admin::connect(&url, DEADLINE)?.set_sync(&args.table, args.server.map(ServerId), &args.sync)?;
    if output.json() {
        return Ok(output.object(&Changed { done })?);
    }
    Ok(output.text(done)?)
}
