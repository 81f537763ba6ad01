//! Who may depend on whom, under which licences, and from where; read from `cargo metadata`.
//!
//! `cargo deny` says much of this better, but it is not on every machine. The accepted licences are read from
//! `deny.toml`, so that they are written down once.

use super::Finding;
use super::files::File;
use super::licences::satisfied;
use crate::stages::cargo_program;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// All that `core` may use. It stays short: every decision of the system must build anywhere.
const CORE_DEPENDENCIES: [&str; 11] = [
    "bytemuck",
    "lz4_flex",
    "microlp",
    "multiversion",
    "postcard",
    "serde",
    "snap",
    "thiserror",
    "toml",
    "xxhash-rust",
    "zstd",
];
/// Crates that end in a person's terminal; libraries have error types of their own.
const MAY_USE_ANYHOW: [&str; 2] = ["paramill", "xtask"];
/// Drivers that must not know each other, or one could lean on the other's behaviour.
const STRANGERS: [(&str, &str); 2] = [("paramill-sim", "paramill-node"), ("paramill-node", "paramill-sim")];
const OUR_LICENCE: &str = "MIT OR Apache-2.0";
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Asks cargo about the workspace and checks the answer.
pub(crate) fn check(root: &Path, files: &[File]) -> Result<Vec<Finding>> {
    let deny = files.iter().find(|file| file.path == "deny.toml").context("deny.toml is missing")?;
    let allowed = allowed_licences(&deny.text).context("deny.toml has no list `allow` in `[licenses]`")?;
    check_metadata(&metadata(root)?, &allowed)
}

fn metadata(root: &Path) -> Result<Value> {
    let host = host_platform()?;
    let output = Command::new(cargo_program())
        .args(["metadata", "--format-version", "1", "--all-features", "--filter-platform", &host])
        .current_dir(root)
        .output()
        .context("cargo could not be started")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    serde_json::from_slice(&output.stdout).context("cargo metadata did not answer in JSON")
}

/// Other platforms' crates are never built here, and asking for them would download them.
fn host_platform() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output().context("rustc could not be started")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("`rustc -vV` did not name its host")?.to_owned())
}

fn check_metadata(metadata: &Value, allowed: &[String]) -> Result<Vec<Finding>> {
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let mut findings = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        match package["source"].as_str() {
            None => findings.extend(check_own(package, name)),
            Some(source) => findings.extend(check_foreign(package, name, source, allowed)),
        }
    }
    Ok(findings)
}

/// A crate of the workspace.
fn check_own(package: &Value, name: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut refuse = |message: String| findings.push(Finding::error(&format!("crate {name}"), 0, message));
    let all = dependencies(package, |_| true);
    if name == "paramill-core" {
        let used = dependencies(package, |kind| kind.is_none());
        for extra in used.iter().filter(|used| !CORE_DEPENDENCIES.contains(used)) {
            refuse(format!(
                "`{extra}` is not on core's list of dependencies (xtask/src/tidy/dependencies.rs)"
            ));
        }
        for unused in CORE_DEPENDENCIES.iter().filter(|listed| !used.contains(listed)) {
            refuse(format!("`{unused}` is on core's list of dependencies and no longer used; take it off"));
        }
    }
    if all.contains(&"anyhow") && !MAY_USE_ANYHOW.contains(&name) {
        refuse("libraries have error types of their own; anyhow is for the binary and xtask".to_owned());
    }
    for (crate_name, stranger) in STRANGERS {
        if name == crate_name && all.contains(&stranger) {
            refuse(format!("the two drivers must not depend on each other, but this one uses {stranger}"));
        }
    }
    if package["license"].as_str() != Some(OUR_LICENCE) {
        refuse(format!("set `license.workspace = true` ({OUR_LICENCE})"));
    }
    findings
}

/// A crate that somebody else wrote.
fn check_foreign(package: &Value, name: &str, source: &str, allowed: &[String]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut refuse = |message: String| findings.push(Finding::error(&format!("crate {name}"), 0, message));
    if source != CRATES_IO {
        refuse(format!("it comes from {source}; only crates.io is accepted"));
    }
    match package["license"].as_str() {
        Some(licence) if satisfied(licence, allowed) => {}
        Some(licence) => refuse(format!("its licence `{licence}` is not accepted by deny.toml")),
        None => refuse("it names no licence".to_owned()),
    }
    findings
}

fn dependencies(package: &Value, wanted: fn(Option<&str>) -> bool) -> Vec<&str> {
    let list = package["dependencies"].as_array().map(Vec::as_slice).unwrap_or_default();
    let wanted = list.iter().filter(|dependency| wanted(dependency["kind"].as_str()));
    wanted.filter_map(|dependency| dependency["name"].as_str()).collect()
}

/// The strings of `allow = [...]` in `[licenses]`.
fn allowed_licences(deny: &str) -> Option<Vec<String>> {
    let section = deny.split("\n[licenses]").nth(1)?;
    let section = section.split("\n[").next()?;
    let list = section.split("\nallow = [").nth(1)?.split(']').next()?;
    Some(list.split('"').skip(1).step_by(2).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn core(dependencies: &[&str]) -> Value {
        let list: Vec<Value> = dependencies.iter().map(|name| json!({"name": name, "kind": null})).collect();
        json!({"name": "paramill-core", "source": null, "license": OUR_LICENCE, "dependencies": list})
    }

    fn messages(package: Value) -> Vec<String> {
        let metadata = json!({"packages": [package]});
        let findings = check_metadata(&metadata, &["MIT".to_owned()]).unwrap();
        findings.into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn the_list_of_core_is_exact() {
        assert_eq!(messages(core(&CORE_DEPENDENCIES)), [""; 0]);
        let extra = messages(core(&[&CORE_DEPENDENCIES[..], &["rand"]].concat()));
        assert!(extra.len() == 1 && extra[0].contains("`rand`"), "{extra:?}");
        let missing = messages(core(&CORE_DEPENDENCIES[1..]));
        assert!(missing.len() == 1 && missing[0].contains(CORE_DEPENDENCIES[0]), "{missing:?}");
    }

    #[test]
    fn drivers_do_not_know_each_other_even_in_tests() {
        let package = json!({"name": "paramill-sim", "license": OUR_LICENCE,
            "dependencies": [{"name": "paramill-node", "kind": "dev"}, {"name": "anyhow", "kind": null}]});
        assert_eq!(messages(package).len(), 2);
    }

    #[test]
    fn licences_and_sources_of_others() {
        let package = |licence, source| json!({"name": "x", "license": licence, "source": source});
        assert_eq!(messages(package(Some("MIT OR GPL-3.0"), CRATES_IO)), [""; 0]);
        assert_eq!(messages(package(Some("GPL-3.0"), CRATES_IO)).len(), 1);
        assert_eq!(messages(package(None, "git+https://example.org/x")).len(), 2);
    }

    #[test]
    fn accepted_licences_are_read_from_deny_toml() {
        let deny = "[bans]\nallow = [\"no\"]\n\n[licenses]\nversion = 2\nallow = [\n    \"MIT\",\n    \"ISC\", # why\n]\n";
        assert_eq!(allowed_licences(deny).unwrap(), ["MIT", "ISC"]);
        assert_eq!(allowed_licences("[licenses]\n"), None);
    }
}
