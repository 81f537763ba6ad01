//! What to do when the operating system has no more of something.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::io;

/// Adds what to do to an error that tells of a limit on files, threads or memory. Others stay as they are.
pub fn explain(error: io::Error) -> io::Error {
    match remedy(&error) {
        Some(remedy) => io::Error::new(error.kind(), format!("{error}; {remedy}")),
        None => error,
    }
}

/// What to do about a limit on files, threads or memory; `None` for an error that tells of something else.
pub(crate) fn remedy(error: &io::Error) -> Option<String> {
    match Errno::from_io_error(error)? {
        Errno::MFILE => {
            let limit = getrlimit(Resource::Nofile).current;
            let limit = limit.map_or("no more".to_owned(), |limit| limit.to_string());
            Some(format!("a process may have {limit} files open here; `ulimit -n` raises that"))
        }
        Errno::NFILE => Some("this machine has as many files open as it can (fs.file-max)".to_owned()),
        Errno::AGAIN => {
            let look = "look at `ulimit -u`, `ulimit -v` and the limits of the container (pids.max)";
            Some(format!("no more threads or processes can be started here; {look}"))
        }
        Errno::NOMEM => {
            let look = "look at `ulimit -v` and the limits of the container (memory.max)";
            Some(format!("no more memory can be had here; {look}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_named_with_what_raises_them() {
        let told = |errno: Errno| explain(errno.into()).to_string();
        assert!(told(Errno::MFILE).contains("`ulimit -n` raises that"), "{}", told(Errno::MFILE));
        assert!(told(Errno::AGAIN).contains("`ulimit -u`"), "{}", told(Errno::AGAIN));
        assert!(told(Errno::NOMEM).contains("`ulimit -v`"), "{}", told(Errno::NOMEM));
        assert_eq!(told(Errno::CONNREFUSED), io::Error::from(Errno::CONNREFUSED).to_string());
    }
}
