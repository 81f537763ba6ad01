//! `paramill set`: changes policies of a running job.

use crate::args::SetArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use paramill_core::policy::{Policies, PolicyOverride};
use paramill_core::registry::Registry;
use paramill_core::types::ServerId;
use paramill_node::admin::Admin;
use paramill_node::url::JobUrl;
use serde::Serialize;
use std::time::Duration;

/// How long the coordinator may take for an answer: longer than it waits until everybody has followed, so that it can say who
/// has not.
const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Serialize)]
struct Changed {
    done: String,
}

pub(crate) fn run(args: &SetArgs, registry: &Registry, output: &Output) -> Result<(), Failure> {
    let url = JobUrl::of_any_job(&args.url).or_usage()?;
    let policies = Policies::parse(args.changes.iter().map(String::as_str)).or_usage()?;
    policies.check(registry).or_usage()?;
    let change = PolicyOverride::new(&args.table, policies).on(args.server.map(ServerId));
    let done = Admin::connect(&url, DEADLINE)?.set(change)?;
    if output.json() {
        return Ok(output.object(&Changed { done })?);
    }
    Ok(output.text(done)?)
}
