//! A TCP stream whose bytes go through the node's bucket.

use crate::clock;
use crate::rate::Bucket;
use crate::transport::stream::Pipe;
use paramill_core::types::Time;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The stream. Writing would block while the bucket is full, whatever room the socket has.
#[derive(Debug)]
pub(super) struct Metered {
    stream: TcpStream,
    bucket: Arc<Bucket>,
    held_until: Option<Time>,
}

impl Metered {
    pub(super) fn new(stream: TcpStream, bucket: Arc<Bucket>) -> Metered {
        Metered { stream, bucket, held_until: None }
    }

    /// Writes as many of so many bytes as the bucket takes now.
    fn write_some(
        &mut self,
        wanted: usize,
        write: impl FnOnce(&mut TcpStream, usize) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let granted = self.bucket.take(clock::now(), wanted);
        self.held_until = granted.err();
        let granted = granted.map_err(|_| io::Error::from(ErrorKind::WouldBlock))?;
        let written = write(&mut self.stream, granted);
        self.bucket.put_back(granted - written.as_ref().map_or(0, |bytes| *bytes));
        written
    }
}

impl Read for Metered {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.stream.read(room)
    }

    fn read_vectored(&mut self, rooms: &mut [io::IoSliceMut<'_>]) -> io::Result<usize> {
        self.stream.read_vectored(rooms)
    }
}

impl Write for Metered {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_some(bytes.len(), |stream, granted| stream.write(&bytes[..granted]))
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let wanted = slices.iter().map(|slice| slice.len()).sum();
        self.write_some(wanted, |stream, granted| {
            let mut left = granted;
            let is_whole = |slice: &&IoSlice<'_>| {
                let fits = slice.len() <= left;
                left -= if fits { slice.len() } else { 0 };
                fits
            };
            match slices.iter().take_while(is_whole).count() {
                0 => stream.write(&slices[0][..granted]),
                whole => stream.write_vectored(&slices[..whole]),
            }
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl AsFd for Metered {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Pipe for Metered {
    fn take_error(&self) -> io::Result<Option<io::Error>> {
        Pipe::take_error(&self.stream)
    }

    fn hang_up(&self) {
        self.stream.hang_up();
    }

    fn held_until(&self) -> Option<Time> {
        self.held_until
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn nothing_is_written_beyond_what_the_bucket_takes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        // So slow that nothing leaks while the test runs: one burst is 16,000 bytes.
        let mut metered = Metered::new(stream, Arc::new(Bucket::new("1kbit".parse().unwrap())));
        let (head, body) = ([1; 100], [2; 15_000]);
        let slices = [IoSlice::new(&head), IoSlice::new(&body), IoSlice::new(&body)];
        assert_eq!(metered.write_vectored(&slices).unwrap(), 15_100, "slices that fit as a whole");
        assert_eq!(metered.held_until(), None);
        let mut received = vec![0; 15_100];
        receiver.read_exact(&mut received).unwrap();
        assert!(received[..100] == head && received[100..] == body);
        let error = metered.write(&body).unwrap_err();
        assert_eq!((error.kind(), metered.held_until().is_some()), (ErrorKind::WouldBlock, true));
    }
}
