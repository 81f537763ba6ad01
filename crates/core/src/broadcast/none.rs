//! No broadcast: servers answer pulls.

use super::star::star;
use super::{Broadcast, Forest, ForestError, Members};
use crate::registry::Entry;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Broadcast> = Entry {
    name: "none",
    about: "No broadcast: workers pull, and servers answer each of them.",
    params: &[],
    example: "none",
    build: |spec| Ok(Box::new(spec.config::<NoBroadcast>()?)),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NoBroadcast {}

impl Broadcast for NoBroadcast {
    fn forest(&self, members: &Members<'_>) -> Result<Forest, ForestError> {
        Ok(star(members))
    }

    fn publishes(&self) -> bool {
        false
    }
}
