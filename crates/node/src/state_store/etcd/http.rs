//! One request over HTTP/1.0: the answer ends with the connection, so that it comes in one piece.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

/// How long each step of a request may take: less than a lease, so that one member which is gone does not end it.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest answer: a state in base64, and what is around it.
const MAX_ANSWER: u64 = 64 << 20;

/// Posts a body of JSON. The answer's body, or why there is none.
pub(super) fn post(endpoint: &str, path: &str, body: &str) -> io::Result<String> {
    let unknown = || io::Error::new(io::ErrorKind::NotFound, "its name has no address");
    let address = endpoint.to_socket_addrs()?.next().ok_or_else(unknown)?;
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let length = body.len();
    write!(stream, "POST {path} HTTP/1.0\r\nHost: {endpoint}\r\nContent-Length: {length}\r\n\r\n{body}")?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER).read_to_string(&mut answer)?;
    body_of(&answer).map(str::to_owned)
}

fn body_of(answer: &str) -> io::Result<&str> {
    let wrong =
        |why: &str| io::Error::new(io::ErrorKind::InvalidData, format!("{why}: {:.200}", answer.trim()));
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| wrong("no HTTP"))?;
    match head.split(' ').nth(1) {
        Some("200") => Ok(body),
        _ => Err(wrong("refused")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_its_body_or_a_reason() {
        assert_eq!(body_of("HTTP/1.0 200 OK\r\nA: b\r\n\r\n{}").unwrap(), "{}");
        let why =
            body_of("HTTP/1.0 400 Bad Request\r\n\r\n{\"error\":\"request is too large\"}").unwrap_err();
        assert!(why.to_string().contains("too large"), "{why}");
        assert!(body_of("hello").is_err());
    }
}
