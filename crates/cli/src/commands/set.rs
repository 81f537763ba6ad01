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
    let changes: Vec<String> = args.changes.iter().map(|change| as_axis(change)).collect();
    let policies = Policies::parse(changes.iter().map(String::as_str)).or_usage()?;
    policies.check(registry).or_usage()?;
    let change = PolicyOverride::new(&args.table, policies).on(args.server.map(ServerId));
    let done = Admin::connect(&url, DEADLINE)?.set(change)?;
    if output.json() {
        return Ok(output.object(&Changed { done })?);
    }
    Ok(output.text(done)?)
}

/// `answer-codec=f16`, as the option is written, is `answer_codec=f16`.
fn as_axis(change: &str) -> String {
    match change.split_once('=') {
        Some((axis, text)) => format!("{}={text}", axis.replace('-', "_")),
        None => change.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_named_as_their_options_are() {
        assert_eq!(as_axis("answer-codec=by-size:a=1"), "answer_codec=by-size:a=1");
        assert_eq!(as_axis("answer_codec=none"), "answer_codec=none");
        assert_eq!(as_axis("answer-codec"), "answer-codec");
    }
}
