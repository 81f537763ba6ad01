//! `paramill set`: changes a policy of a running job.

use crate::args::SetArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use paramill_core::consistency::SyncPolicy;
use paramill_core::optimizer::OptimizerPolicy;
use paramill_core::registry::Registry;
use paramill_core::types::ServerId;
use paramill_node::admin::Admin;
use paramill_node::url::JobUrl;
use serde::Serialize;
use std::time::Duration;

/// How long the coordinator may take for an answer.
const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Serialize)]
struct Changed {
    done: String,
}

pub(crate) fn run(args: &SetArgs, registry: &Registry, output: &Output) -> Result<(), Failure> {
    let url = JobUrl::of_any_job(&args.url).or_usage()?;
    if let Some(sync) = &args.sync {
        SyncPolicy::parse(&registry.consistency, sync).or_usage()?;
    }
    if let Some(optimizer) = &args.optimizer {
        OptimizerPolicy::parse(&registry.optimizer, optimizer).or_usage()?;
    }
    let (mut admin, server) = (Admin::connect(&url, DEADLINE)?, args.server.map(ServerId));
    let mut done = Vec::new();
    if let Some(sync) = &args.sync {
        done.push(admin.set_sync(&args.table, server, sync)?);
    }
    if let Some(optimizer) = &args.optimizer {
        done.push(admin.set_optimizer(&args.table, server, optimizer)?);
    }
    let done = done.join("; ");
    if output.json() {
        return Ok(output.object(&Changed { done })?);
    }
    Ok(output.text(done)?)
}
