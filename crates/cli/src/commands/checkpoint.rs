//! `paramill checkpoint`: has a running job make a checkpoint, where its servers keep them or in a file here.

use crate::args::SaveArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use paramill_node::admin::Admin;
use paramill_node::checkpoint;
use paramill_node::url::JobUrl;
use serde::Serialize;

#[derive(Serialize)]
struct Saved {
    done: String,
}

pub(crate) fn run(args: &SaveArgs, output: &Output) -> Result<(), Failure> {
    let url = JobUrl::of_any_job(&args.url).or_usage()?;
    let mut admin = Admin::connect(&url, args.timeout.0)?;
    let done = match &args.file {
        Some(path) => checkpoint::copy(&mut admin, path, None).map_err(anyhow::Error::from)?,
        None => admin.checkpoint()?,
    };
    if output.json() {
        return Ok(output.object(&Saved { done })?);
    }
    Ok(output.text(done)?)
}
