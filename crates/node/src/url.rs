//! One URL joins anything: `paramill://host:7070/job`.

use std::fmt;
use std::str::FromStr;

/// The port of a job when none is given.
pub const DEFAULT_PORT: u16 = 7070;
/// The name of a job when none is given.
pub const DEFAULT_JOB: &str = "job";

/// Where a job's coordinator is, and which job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobUrl {
    /// `host:port`; several with commas between them where the coordinator may be at any of them.
    pub address: String,
    /// The job's name.
    pub job: String,
}

/// The text is not a job's URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a job's URL ({why}); expected paramill://HOST[:PORT][/JOB]")]
pub struct UrlError {
    text: String,
    why: &'static str,
}

impl JobUrl {
    /// Reads the URL of whatever job is there, for commands: without a name in the text, `job` is empty, which the coordinator
    /// takes for its own.
    pub fn of_any_job(text: &str) -> Result<JobUrl, UrlError> {
        let mut url: JobUrl = text.parse()?;
        if !text.split_once("://").map_or(text, |(_, rest)| rest).contains('/') {
            url.job.clear();
        }
        Ok(url)
    }
}

impl FromStr for JobUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<JobUrl, UrlError> {
        let fail = |why| Err(UrlError { text: text.to_owned(), why });
        let rest = match text.split_once("://") {
            Some(("paramill", rest)) => rest,
            Some(_) => return fail("the scheme is not paramill"),
            None => text,
        };
        let (authority, job) = rest.split_once('/').unwrap_or((rest, DEFAULT_JOB));
        if job.is_empty() || job.contains('/') || job.len() > paramill_core::limits::MAX_NAME_BYTES {
            return fail("the job's name is missing or malformed");
        }
        let mut addresses = Vec::new();
        for host in authority.split(',') {
            let has_port = host.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']'));
            if host.is_empty() || host.starts_with(':') {
                return fail("the host is missing");
            }
            if has_port && host.rsplit_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
                return fail("the port is not a number up to 65535");
            }
            addresses.push(if has_port { host.to_owned() } else { format!("{host}:{DEFAULT_PORT}") });
        }
        if addresses.len() > paramill_core::limits::MAX_ADDRESSES {
            return fail("it has more addresses than a coordinator may have");
        }
        Ok(JobUrl { address: addresses.join(","), job: job.to_owned() })
    }
}

impl fmt::Display for JobUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "paramill://{}/{}", self.address, self.job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, address, job) in [
            ("paramill://host:7171/run42", "host:7171", "run42"),
            ("paramill://host/run42", "host:7070", "run42"),
            ("paramill://a,b:7171,[::1]/run42", "a:7070,b:7171,[::1]:7070", "run42"),
            ("paramill://host", "host:7070", "job"),
            ("127.0.0.1:9", "127.0.0.1:9", "job"),
            ("paramill://[::1]:80/x", "[::1]:80", "x"),
            ("paramill://[::1]/x", "[::1]:7070", "x"),
        ] {
            let url: JobUrl = text.parse().unwrap();
            assert_eq!((url.address.as_str(), url.job.as_str()), (address, job), "{text}");
            assert_eq!(url.to_string().parse::<JobUrl>().unwrap(), url);
        }
    }

    #[test]
    fn commands_may_leave_the_name_out() {
        for (text, job) in
            [("host:7171", ""), ("paramill://host", ""), ("host/job", "job"), ("paramill://h:1/x", "x")]
        {
            assert_eq!(JobUrl::of_any_job(text).unwrap().job, job, "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_url() {
        for text in
            ["http://host/x", "paramill://", "paramill://:70/x", "paramill://h:port", "paramill://h:70/", ""]
        {
            let error = text.parse::<JobUrl>().unwrap_err().to_string();
            assert!(error.contains("expected paramill://HOST"), "{error}");
        }
    }
}
