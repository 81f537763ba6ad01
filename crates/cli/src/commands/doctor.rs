//! `paramill doctor`: what this machine and an address can do, what is in the way, and the remedy.

mod address;
mod machine;
mod tcp;

use crate::args::DoctorArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::{Align, Output, Table};
use address::Address;
use anyhow::anyhow;
use serde::Serialize;

/// Examines everything and reports it; fails when something stands in the way.
pub(crate) fn run(args: &DoctorArgs, output: &Output) -> Result<(), Failure> {
    let address: Address = args.address.parse().map_err(|why: String| anyhow!(why)).or_usage()?;
    let deadline = args.deadline.0;
    let mut progress = output.progress(3);
    progress.set(0, "looking at the machine");
    let mut checks = machine::examine();
    progress.set(1, "measuring TCP over loopback");
    checks.extend(tcp::examine());
    progress.set(2, &format!("trying {address}"));
    checks.extend(address::examine(&address, deadline));
    drop(progress);
    report(&checks, output)
}

fn report(checks: &[Check], output: &Output) -> Result<(), Failure> {
    let failed: Vec<&str> =
        checks.iter().filter(|check| check.verdict == Verdict::Fail).map(|check| check.name).collect();
    if output.json() {
        output.object(&Report { ok: failed.is_empty(), checks })?;
    } else {
        let mut table = Table::new([("check", Align::Left), ("", Align::Left), ("found", Align::Left)]);
        for check in checks {
            table.row([check.name, check.verdict.word(), &check.found]);
        }
        output.table(&table)?;
        for check in checks {
            if let Some(remedy) = &check.remedy {
                output.text(format!("\n{} {}: {remedy}", check.verdict.word(), check.name))?;
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(anyhow!("in the way: {}", failed.join(", ")).into()) }
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    ok: bool,
    checks: &'a [Check],
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Check {
    name: &'static str,
    verdict: Verdict,
    /// What there is, in words.
    found: String,
    /// The main figure, for programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<f64>,
    /// The unit of `value`.
    #[serde(skip_serializing_if = "Option::is_none")]
    unit: Option<&'static str>,
    /// What to do about it, when there is something to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    Warn,
    Fail,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Verdict::Ok => "ok",
            Verdict::Warn => "warn",
            Verdict::Fail => "FAIL",
        }
    }
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Check {
        Check { name, verdict: Verdict::Ok, found: found.into(), value: None, unit: None, remedy: None }
    }

    fn warn(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { verdict: Verdict::Warn, remedy: Some(remedy.into()), ..Check::ok(name, found) }
    }

    fn fail(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { verdict: Verdict::Fail, ..Check::warn(name, found, remedy) }
    }

    fn figure(self, value: f64, unit: &'static str) -> Check {
        Check { value: Some(value), unit: Some(unit), ..self }
    }
}
