//! `paramill checkpoint`: has a running job make a checkpoint.

use crate::args::SaveArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use paramill_node::admin::Admin;
use paramill_node::url::JobUrl;
use serde::Serialize;

#[derive(Serialize)]
struct Saved {
    done: String,
}

pub(crate) fn run(args: &SaveArgs, output: &Output) -> Result<(), Failure> {
    let url = JobUrl::of_any_job(&args.url).or_usage()?;
    let done = Admin::connect(&url, args.timeout.0)?.checkpoint()?;
    if output.json() {
        return Ok(output.object(&Saved { done })?);
    }
    Ok(output.text(done)?)
}
