//! What a loop waits for: descriptors, by epoll, and its waker.

use crate::waker::{Doorbell, Waker, Watched};
use rustix::event::{Timespec, epoll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// The sources of one loop's events.
#[derive(Debug)]
pub(super) struct Watch {
    epoll: OwnedFd,
    waker: Arc<Waker>,
}

impl Watch {
    /// Events of the waker have this key.
    pub(super) fn new(waker: &Arc<Waker>, key: u64) -> io::Result<Watch> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, waker.descriptor(), epoll::EventData::new_u64(key), epoll::EventFlags::IN)?;
        Ok(Watch { epoll, waker: waker.clone() })
    }

    /// Watches a source for events of these kinds. One without a descriptor rings for both kinds.
    pub(super) fn add(
        &self,
        source: &mut (impl Watched + ?Sized),
        key: u64,
        flags: epoll::EventFlags,
    ) -> io::Result<()> {
        match source.descriptor() {
            Some(descriptor) => {
                Ok(epoll::add(&self.epoll, descriptor, epoll::EventData::new_u64(key), flags)?)
            }
            None => {
                source.ring_with(Doorbell::new(&self.waker, key));
                Ok(())
            }
        }
    }

    /// Watches a source for other events.
    pub(super) fn change(
        &self,
        source: &(impl Watched + ?Sized),
        key: u64,
        flags: epoll::EventFlags,
    ) -> io::Result<()> {
        let Some(descriptor) = source.descriptor() else { return Ok(()) };
        Ok(epoll::modify(&self.epoll, descriptor, epoll::EventData::new_u64(key), flags)?)
    }

    /// Watches a source no more. One without a descriptor still rings.
    pub(super) fn remove(&self, source: &(impl Watched + ?Sized)) -> io::Result<()> {
        let Some(descriptor) = source.descriptor() else { return Ok(()) };
        Ok(epoll::delete(&self.epoll, descriptor)?)
    }

    /// Waits for events. `None`: for as long as it takes.
    pub(super) fn wait(&self, events: &mut Vec<epoll::Event>, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
