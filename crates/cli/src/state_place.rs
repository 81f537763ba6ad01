//! Where a coordinator keeps its state: what was typed, or a file of the user's.

use crate::args::MemoryArgs;
use anyhow::{Result, ensure};
use paramill_core::limits;
use paramill_node::env_vars;
use paramill_node::state_store::StatePlace;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The place for a job that is found at this address.
pub(crate) fn resolve(args: &MemoryArgs, listen: &str, job: &str) -> Result<Option<StatePlace>> {
    let place = match args.state.as_deref() {
        Some("none") => None,
        Some(text) => {
            // As a path it would be a file in a folder `http:`.
            ensure!(
                !text.contains("://") || text.starts_with("etcd://"),
                "--state {text}: expected a path, etcd://HOST:PORT[,HOST:PORT]/PREFIX, or `none`"
            );
            Some(text.parse()?)
        }
        None => {
            let folder =
                |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
            let own = folder(env_vars::STATE_HOME);
            let home = folder(env_vars::HOME).map(|home| home.join(".local/state"));
            own.or(home).and_then(|folder| in_folder(&folder, listen, job))
        }
    };
    ensure!(
        args.coordinator_grace.is_none() || place.is_some(),
        "--coordinator-grace: the coordinator's state is kept nowhere, so that nothing can take its place; give --state PATH, or leave \
         --coordinator-grace out"
    );
    Ok(place)
}

/// How long members wait for a coordinator that is started anew.
pub(crate) fn grace(args: &MemoryArgs) -> Duration {
    args.coordinator_grace.map_or(limits::COORDINATOR_GRACE, |grace| grace.0)
}

/// A file for each address and job. A job whose port the system chooses is not found again.
fn in_folder(folder: &Path, listen: &str, job: &str) -> Option<StatePlace> {
    let (_, port) = listen.rsplit_once(':').filter(|(_, port)| *port != "0")?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = format!("{job}-{port}").chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
    Some(StatePlace::File(folder.join("paramill").join(name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::duration::Span;

    #[test]
    fn each_job_and_port_has_a_file_of_its_own() {
        let place = |listen, job| in_folder(Path::new("/state"), listen, job).map(|place| place.to_string());
        assert_eq!(place("127.0.0.1:7070", "a/b").as_deref(), Some("/state/paramill/a_b-7070"));
        assert_eq!(place("[::1]:7071", "job").as_deref(), Some("/state/paramill/job-7071"));
        assert_eq!(place("127.0.0.1:0", "job"), None, "nobody finds it again");
    }

    #[test]
    fn what_was_typed_wins() {
        let resolved = |state: &str| resolve(&args(state), "127.0.0.1:7070", "job").unwrap();
        assert_eq!(resolved("none"), None);
        assert_eq!(resolved("here"), Some(StatePlace::File("here".into())));
    }

    #[test]
    fn what_would_have_no_effect_is_refused() {
        let why = |args| resolve(&args, "127.0.0.1:7070", "job").unwrap_err().to_string();
        assert!(why(args("etcd://")).contains("expected etcd://HOST:PORT"));
        let said = why(args("http://127.0.0.1:2379/a"));
        assert!(said.contains("--state http://127.0.0.1:2379/a: expected a path, etcd://"), "{said}");
        let patient =
            |state| MemoryArgs { coordinator_grace: Some(Span(Duration::from_secs(5))), ..args(state) };
        let said = why(patient("none"));
        assert!(said.contains("kept nowhere") && said.contains("give --state PATH"), "{said}");
        assert!(resolve(&patient("here"), "127.0.0.1:7070", "job").is_ok());
        assert_eq!(grace(&patient("here")), Duration::from_secs(5));
        assert_eq!(grace(&args("here")), Duration::from_secs(600));
    }

    fn args(state: &str) -> MemoryArgs {
        MemoryArgs { state: Some(state.into()), coordinator_grace: None }
    }
}
