//! `paramill rebalance`: spreads a running job's shards over its servers anew.

use crate::args::RebalanceArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use paramill_node::admin::Admin;
use paramill_node::url::JobUrl;
use serde::Serialize;
use std::time::Duration;

/// How long the coordinator may take for an answer.
const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Serialize)]
struct Rebalanced {
    done: String,
}

pub(crate) fn run(args: &RebalanceArgs, output: &Output) -> Result<(), Failure> {
    let url = JobUrl::of_any_job(&args.url).or_usage()?;
    let done = Admin::connect(&url, DEADLINE)?.rebalance()?;
    if output.json() {
        return Ok(output.object(&Rebalanced { done })?);
    }
    Ok(output.text(done)?)
}
