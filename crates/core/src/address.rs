//! Addresses of a node: one or several, and the order in which a caller tries them.

use crate::limits;
use crate::wire::bounded::sequence;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Prefix of addresses that only nodes of the same host can use. They are tried first: what can be shared need not be
/// sent. A driver that cannot use one reports the connection lost, and the next address is tried at once.
pub const LOCAL: &str = "unix:";

/// The addresses of one node, each of which leads to it: `host:port`, [`LOCAL`] with a name, or a name of the
/// in-memory transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addresses(#[serde(deserialize_with = "sequence::<_, _, { limits::MAX_ADDRESSES }>")] Vec<String>);

impl Addresses {
    /// Addresses with commas between them.
    pub fn list(text: &str) -> Addresses {
        text.split(',').map(str::to_owned).collect()
    }

    /// Each of them, in the order of trying.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether they can be used and told to others; the error says why not.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=limits::MAX_ADDRESSES).contains(&self.0.len()) {
            return Err(format!("{} addresses: expected 1 to {}", self.0.len(), limits::MAX_ADDRESSES));
        }
        match self.iter().find(|address| !(1..=limits::MAX_NAME_BYTES).contains(&address.len())) {
            None => Ok(()),
            // One that is too long is not repeated.
            Some(address) => Err(format!(
                "an address of {} bytes: expected 1 to {}",
                address.len(),
                limits::MAX_NAME_BYTES
            )),
        }
    }

    /// The order in which one of many callers tries them: local ones first, then the others, beginning with another
    /// one for each caller. So the callers' connections are spread over all interfaces.
    pub fn for_caller(&self, caller: usize) -> Addresses {
        let (mut ordered, mut remote): (Vec<String>, Vec<String>) =
            self.0.iter().cloned().partition(|address| address.starts_with(LOCAL));
        if !remote.is_empty() {
            let first = caller % remote.len();
            remote.rotate_left(first);
        }
        ordered.append(&mut remote);
        Addresses(ordered)
    }
}

impl FromIterator<String> for Addresses {
    fn from_iter<I: IntoIterator<Item = String>>(addresses: I) -> Addresses {
        Addresses(addresses.into_iter().collect())
    }
}

impl From<String> for Addresses {
    fn from(address: String) -> Addresses {
        Addresses(vec![address])
    }
}

impl From<&str> for Addresses {
    fn from(address: &str) -> Addresses {
        Addresses::from(address.to_owned())
    }
}

impl fmt::Display for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}

/// The addresses of an aggregator: those of each of its cores. Each core stands for some of the shards.
///
/// As text: addresses of a core with commas between them, cores with `+` between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoreAddresses(Vec<Addresses>);

impl CoreAddresses {
    /// The addresses of the core that stands for the shard at this place in the plan.
    pub fn of_shard(&self, place: usize) -> &Addresses {
        &self.0[core_of(place, self.0.len())]
    }

    /// Those of each core.
    pub fn iter(&self) -> impl Iterator<Item = &Addresses> {
        self.0.iter()
    }
}

/// The core of an aggregator that stands for the shard at this place in the plan.
pub fn core_of(place: usize, cores: usize) -> usize {
    place % cores.max(1)
}

impl FromIterator<Addresses> for CoreAddresses {
    fn from_iter<I: IntoIterator<Item = Addresses>>(cores: I) -> CoreAddresses {
        CoreAddresses(cores.into_iter().collect())
    }
}

impl From<&str> for CoreAddresses {
    fn from(text: &str) -> CoreAddresses {
        let addresses = |core: &str| core.split(',').map(|address| address.trim().to_owned()).collect();
        text.split('+').map(addresses).collect()
    }
}

impl fmt::Display for CoreAddresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cores = self.0.iter().map(|addresses| addresses.0.join(","));
        f.write_str(&cores.collect::<Vec<_>>().join("+"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cores_of_an_aggregator_stand_for_the_shards_in_turn() {
        let text = "unix:x,a:1+unix:y, a:2+a:3";
        let cores = CoreAddresses::from(text);
        let of = |place: usize| cores.of_shard(place).to_string();
        assert_eq!([0, 1, 2, 3].map(of), ["unix:x, a:1", "unix:y, a:2", "a:3", "unix:x, a:1"]);
        assert_eq!((cores.iter().count(), cores.to_string()), (3, text.replace(' ', "")));
        assert_eq!(CoreAddresses::from("a:1").of_shard(5).to_string(), "a:1");
    }

    fn addresses(list: &[&str]) -> Addresses {
        list.iter().map(|&address| address.to_owned()).collect()
    }

    #[test]
    fn callers_begin_with_different_interfaces_and_all_with_what_is_local() {
        let all = addresses(&["a:1", "b:1", "unix:x", "c:1"]);
        let order = |caller| all.for_caller(caller).to_string();
        assert_eq!(order(0), "unix:x, a:1, b:1, c:1");
        assert_eq!(order(1), "unix:x, b:1, c:1, a:1");
        assert_eq!(order(5), "unix:x, c:1, a:1, b:1");
        assert_eq!(addresses(&["unix:x"]).for_caller(7).to_string(), "unix:x");
        assert_eq!(addresses(&[]).for_caller(7).count(), 0);
    }

    #[test]
    fn none_too_many_and_too_long_ones_are_refused() {
        assert_eq!(addresses(&["a:1", "b:1"]).check(), Ok(()));
        for (list, expected) in [
            (vec![], "0 addresses: expected 1 to 8"),
            (vec!["a:1"; 9], "9 addresses"),
            (vec!["a:1", ""], "an address of 0 bytes"),
        ] {
            let why = addresses(&list).check().unwrap_err();
            assert!(why.contains(expected), "{why}");
        }
        let why = Addresses::from("x".repeat(1000)).check().unwrap_err();
        assert!(why.contains("an address of 1000 bytes") && why.len() < 100, "{why}");
    }

    #[test]
    fn more_than_the_limit_are_not_read() {
        let read = |count: usize| {
            let bytes = postcard::to_allocvec(&vec!["a"; count]).unwrap();
            postcard::from_bytes::<Addresses>(&bytes).map(|read| read.count())
        };
        assert_eq!(read(limits::MAX_ADDRESSES), Ok(limits::MAX_ADDRESSES));
        assert!(read(limits::MAX_ADDRESSES + 1).is_err());
    }
}
