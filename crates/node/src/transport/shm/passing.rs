//! File descriptors that travel with bytes over a Unix socket, and who is at its other end.

#![allow(unsafe_code, reason = "the peer's user is asked for with a plain system call")]

use super::SharedError;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Descriptors that may come with one message. One is all that a peer that keeps the protocol sends.
const AT_ONCE: usize = 4;
/// Descriptors that may wait for the frames that announce them.
const WAITING: usize = 16;

/// Sends a frame with a descriptor. The socket takes all of it, or says that it is full.
pub(super) fn send(stream: &UnixStream, frame: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    let has_room = control.push(SendAncillaryMessage::ScmRights(&descriptors));
    debug_assert!(has_room, "the space is for one descriptor");
    let sent = rustix::net::sendmsg(stream, &[IoSlice::new(frame)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == frame.len() {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::WriteZero, "the socket took only a part of one small frame"))
    }
}

/// Reads once; descriptors that come along are added to `waiting`.
pub(super) fn receive(
    stream: &UnixStream,
    buffer: &mut [u8],
    waiting: &mut VecDeque<OwnedFd>,
) -> Result<usize, SharedError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(buffer)];
    let received = rustix::net::recvmsg(stream, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(|error| SharedError::System(error.into()))?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            waiting.extend(descriptors);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) || waiting.len() > WAITING {
        waiting.clear();
        return Err(SharedError::TooManyDescriptors);
    }
    Ok(received.bytes)
}

/// Whether memory may be shared with who is at the other end: this process's user, or root.
pub(super) fn check_peer(stream: &UnixStream) -> Result<(), SharedError> {
    let (theirs, ours) = (peer_user(stream)?, rustix::process::geteuid().as_raw());
    if theirs == ours || theirs == 0 { Ok(()) } else { Err(SharedError::Stranger { theirs, ours }) }
}

/// The user that the process at the other end had when it connected, or began to listen.
fn peer_user(stream: &UnixStream) -> Result<u32, SharedError> {
    // The process number, which is zero for a process of another namespace, is of no interest here.
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `credentials`, which is plain integers of that length.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(credentials.uid) } else { Err(SharedError::System(io::Error::last_os_error())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    #[test]
    fn a_descriptor_arrives_with_its_frame() {
        let (left, mut right) = UnixStream::pair().unwrap();
        let (mut here, there) = UnixStream::pair().unwrap();
        right.write_all(b"before").unwrap();
        send(&right, &[7; 64], there.as_fd()).unwrap();
        right.write_all(b"after").unwrap();
        drop(there);
        let (mut waiting, mut bytes, mut buffer) = (VecDeque::new(), Vec::new(), [0; 1024]);
        while bytes.len() < 6 + 64 + 5 {
            let count = receive(&left, &mut buffer, &mut waiting).unwrap();
            bytes.extend_from_slice(&buffer[..count]);
        }
        assert_eq!(waiting.len(), 1);
        UnixStream::from(waiting.pop_front().unwrap()).write_all(b"x").unwrap();
        assert_eq!(here.read(&mut buffer).unwrap(), 1);
    }

    #[test]
    fn too_many_descriptors_are_refused_and_closed() {
        let (left, right) = UnixStream::pair().unwrap();
        let (mut here, there) = UnixStream::pair().unwrap();
        let many = [there.as_fd(); AT_ONCE + 3];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE + 3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        rustix::net::sendmsg(&right, &[IoSlice::new(&[1])], &mut control, SendFlags::empty()).unwrap();
        let mut waiting = VecDeque::new();
        let refused = receive(&left, &mut [0; 64], &mut waiting).unwrap_err();
        assert!(matches!(refused, SharedError::TooManyDescriptors));
        drop(there);
        // All copies are closed: the other end is at its end.
        assert_eq!(here.read(&mut [0; 8]).unwrap(), 0);

        let (_here, there) = UnixStream::pair().unwrap();
        let mut outcome = Ok(0);
        for _ in 0..=WAITING {
            send(&right, &[1; 64], there.as_fd()).unwrap();
            outcome = receive(&left, &mut [0; 64], &mut waiting);
        }
        assert!(matches!(outcome, Err(SharedError::TooManyDescriptors)));
        assert!(waiting.is_empty());
    }

    #[test]
    fn this_process_may_share_with_itself() {
        let (left, _right) = UnixStream::pair().unwrap();
        assert_eq!(peer_user(&left).unwrap(), rustix::process::geteuid().as_raw());
        check_peer(&left).unwrap();
    }
}
