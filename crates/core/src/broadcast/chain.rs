//! Chain: every receiver relays to the next.

use super::kary::kary;
use super::{Broadcast, Forest, ForestError, Members};
use crate::registry::Entry;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Broadcast> = Entry {
    name: "chain",
    about: "Receivers relay to one another in a row: nobody sends a byte twice, and the last one is as many hops away as there are receivers.",
    params: &[],
    example: "chain",
    build: |spec| Ok(Box::new(spec.config::<Chain>()?)),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Chain {}

impl Broadcast for Chain {
    fn forest(&self, members: &Members<'_>) -> Result<Forest, ForestError> {
        Ok(kary(members, 1))
    }
}
