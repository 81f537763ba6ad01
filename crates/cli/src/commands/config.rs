//! `paramill config`: the job that defaults, a file and options mean together.

use crate::args::ConfigArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::Output;
use crate::plan::JobPlan;
use paramill_core::registry::Registry;

/// Prints the resolved job, as TOML or as JSON.
pub(crate) fn run(args: &ConfigArgs, registry: &Registry, output: &Output) -> Result<(), Failure> {
    let plan = JobPlan::resolve(&args.job, registry).or_usage()?;
    if output.json() {
        return Ok(output.object(&plan)?);
    }
    Ok(output.text(plan.to_toml())?)
}
