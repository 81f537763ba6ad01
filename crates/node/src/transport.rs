//! How frames get from one node to another: TCP between hosts, shared memory between processes of one host, queues
//! within one process.

pub(crate) mod carrier;
pub(crate) mod elected;
pub(crate) mod memory;
mod queue;
pub(crate) mod resolver;
pub(crate) mod shm;
mod stream;
pub(crate) mod tcp;

use carrier::Carrier;
use elected::Elected;
use memory::Hub;
use paramill_core::address::LOCAL;
use paramill_core::types::{ConnectionId, NodeId};
use serde::{Deserialize, Serialize};
use shm::SharedAllocator;
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use tcp::options::SocketOptions;

/// How workers and data cores exchange gradients and parameters. Control messages always go over TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Shared memory where both are on one host and may share it, TCP elsewhere.
    #[default]
    Auto,
    /// TCP only.
    Tcp,
    /// Shared memory only.
    Shm,
}

impl Transport {
    /// Their names, as users write them.
    pub const NAMES: [&str; 3] = ["auto", "tcp", "shm"];

    /// Whether addresses of this host, or of the network, may be used.
    pub(crate) fn allows(self, is_local: bool) -> bool {
        match self {
            Transport::Auto => true,
            Transport::Tcp => !is_local,
            Transport::Shm => is_local,
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Transport::NAMES[*self as usize])
    }
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(text: &str) -> Result<Transport, String> {
        match text {
            "auto" => Ok(Transport::Auto),
            "tcp" => Ok(Transport::Tcp),
            "shm" => Ok(Transport::Shm),
            other => Err(format!("unknown transport `{other}`; there are {}", Transport::NAMES.join(", "))),
        }
    }
}

/// How the peers of one node are reached.
#[derive(Debug, Clone)]
pub(crate) struct Dialler {
    /// How data cores may be reached.
    pub(crate) transport: Transport,
    /// How TCP sockets are set up.
    pub(crate) sockets: SocketOptions,
    /// The memory that data cores of this host may share.
    pub(crate) memory: SharedAllocator,
    /// The address book of in-memory nodes.
    pub(crate) hub: Option<Hub>,
    /// Where the coordinator is, when it is one of several processes.
    pub(crate) elected: Option<Arc<Elected>>,
}

/// What came of an address.
#[derive(Debug)]
pub(crate) enum Dialled {
    /// It has begun to connect.
    Carrier(Box<dyn Carrier>),
    /// The address begins with a name, which has to be resolved first.
    Name,
}

impl Dialler {
    /// The address to connect to: the one that was asked for, or that of the coordinator which was elected.
    pub(crate) fn actual(&self, address: &str) -> Result<String, String> {
        match &self.elected {
            Some(elected) if elected.is_meant(address) => elected.address(),
            _ => Ok(address.to_owned()),
        }
    }

    /// Begins to connect, over whatever the address says. The transport is chosen for data only.
    pub(crate) fn dial(&self, address: &str, name: ConnectionId) -> Result<Dialled, String> {
        let is_for_data = name.shard().is_some();
        if address.starts_with(memory::SCHEME) {
            let hub = self.hub.as_ref().ok_or_else(|| memory::unknown(address))?;
            return hub.dial(address).map(Dialled::Carrier);
        }
        let is_local = address.starts_with(LOCAL);
        if is_for_data && !self.transport.allows(is_local) {
            return Err(format!("`--transport {}` does not allow {address}", self.transport));
        }
        if is_local {
            let carrier = shm::dial(address, &self.memory).map_err(|error| error.to_string())?;
            return Ok(Dialled::Carrier(carrier));
        }
        match address.parse() {
            Ok(target) => self.dial_resolved(target, name).map(Dialled::Carrier),
            Err(_) => Ok(Dialled::Name),
        }
    }

    /// Begins to connect to an address of a name.
    pub(crate) fn dial_resolved(
        &self,
        target: SocketAddr,
        name: ConnectionId,
    ) -> Result<Box<dyn Carrier>, String> {
        let dialled = match name.peer() == Some(NodeId::Coordinator) {
            true => tcp::dial(target, &self.sockets.for_coordinator()),
            false => tcp::dial(target, &self.sockets),
        };
        dialled.map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for (name, transport) in
            Transport::NAMES.into_iter().zip([Transport::Auto, Transport::Tcp, Transport::Shm])
        {
            assert_eq!((name.parse(), transport.to_string().as_str()), (Ok(transport), name));
        }
        let error = "udp".parse::<Transport>().unwrap_err();
        assert!(error.contains("`udp`") && error.contains("auto, tcp, shm"), "{error}");
    }
}
