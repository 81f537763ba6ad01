//! `paramill drain`: moves everything away from a server of a running job.

use crate::args::DrainArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use paramill_core::types::ServerId;
use paramill_node::admin::Admin;
use paramill_node::url::JobUrl;
use serde::Serialize;
use std::time::Duration;

/// How long the coordinator may take for an answer.
const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Serialize)]
struct Drained {
    done: String,
}

pub(crate) fn run(args: &DrainArgs, output: &Output) -> Result<(), Failure> {
    let url = JobUrl::of_any_job(&args.url).or_usage()?;
    let done = Admin::connect(&url, DEADLINE)?.drain(ServerId(args.server))?;
    if output.json() {
        return Ok(output.object(&Drained { done })?);
    }
    Ok(output.text(done)?)
}
