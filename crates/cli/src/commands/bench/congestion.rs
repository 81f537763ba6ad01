//! The same congestion control for every contender.
//!
//! Most peers cannot be told which to use: they have the system's default. So the whole measurement runs again in a
//! network namespace of its own, whose default is the one that was asked for. Nothing has to be put back afterwards.

use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

const SETTINGS: &str = "/proc/sys/net/ipv4/";
/// Brings loopback up, sets the default, and becomes the command that follows.
const SCRIPT: &str =
    "ip link set lo up && echo \"$1\" > /proc/sys/net/ipv4/tcp_congestion_control && shift && exec \"$@\"";

/// How this system's TCP controls congestion unless a socket is told otherwise.
pub(super) fn default() -> Result<String> {
    setting("tcp_congestion_control")
}

/// Whether the system has it.
pub(super) fn check(asked: &str) -> Result<()> {
    let available = setting("tcp_available_congestion_control")?;
    ensure!(
        available.split_whitespace().any(|name| name == asked),
        "--congestion {asked}: this system has {available}"
    );
    Ok(())
}

/// Returns when `asked` is the default already; otherwise this process becomes one for which it is.
pub(super) fn adopt(asked: &str) -> Result<()> {
    if default()? == asked {
        return Ok(());
    }
    let probe = in_namespace(asked, "true", &[]).output();
    let why = match &probe {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(format!("unshare: {error}")),
    };
    if let Some(why) = why {
        bail!(
            "--congestion {asked} needs a network namespace, which cannot be had ({why}); either install util-linux \
             and iproute2 and run this as root, or change the system's default: sysctl -w \
             net.ipv4.tcp_congestion_control={asked}"
        );
    }
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let error = in_namespace(asked, program, &arguments).exec();
    Err(error).context("cannot start again in a network namespace")
}

fn in_namespace(asked: &str, program: impl Into<OsString>, arguments: &[OsString]) -> Command {
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--net", "--", "sh", "-c", SCRIPT, "sh", asked]).arg(program.into()).args(arguments);
    command
}

fn setting(name: &str) -> Result<String> {
    let file = format!("{SETTINGS}{name}");
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
    Ok(text.trim().to_owned())
}
