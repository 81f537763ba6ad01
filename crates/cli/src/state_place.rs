//! Where a coordinator keeps its state: what was typed, or a file of the user's.

use crate::args::MemoryArgs;
use paramill_node::env_vars;
use paramill_node::state_store::{StateError, StatePlace};
use std::path::{Path, PathBuf};

/// The place for a job that is found at this address.
pub(crate) fn resolve(args: &MemoryArgs, listen: &str, job: &str) -> Result<Option<StatePlace>, StateError> {
    match args.state.as_deref() {
        Some("none") => Ok(None),
        Some(text) => text.parse().map(Some),
        None => {
            let folder =
                |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
            let own = folder(env_vars::STATE_HOME);
            let home = folder(env_vars::HOME).map(|home| home.join(".local/state"));
            Ok(own.or(home).and_then(|folder| in_folder(&folder, listen, job)))
        }
    }
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
    use std::time::Duration;

    #[test]
    fn each_job_and_port_has_a_file_of_its_own() {
        let place = |listen, job| in_folder(Path::new("/state"), listen, job).map(|place| place.to_string());
        assert_eq!(place("127.0.0.1:7070", "a/b").as_deref(), Some("/state/paramill/a_b-7070"));
        assert_eq!(place("[::1]:7071", "job").as_deref(), Some("/state/paramill/job-7071"));
        assert_eq!(place("127.0.0.1:0", "job"), None, "nobody finds it again");
    }

    #[test]
    fn what_was_typed_wins() {
        let args =
            |state: &str| MemoryArgs { state: Some(state.into()), coordinator_grace: Span(Duration::ZERO) };
        assert_eq!(resolve(&args("none"), "127.0.0.1:7070", "job"), Ok(None));
        let place = resolve(&args("here"), "127.0.0.1:7070", "job").unwrap();
        assert_eq!(place, Some(StatePlace::File("here".into())));
        assert!(resolve(&args("etcd://"), "127.0.0.1:7070", "job").is_err());
    }
}
