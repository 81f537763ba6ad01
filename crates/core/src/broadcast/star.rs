//! Star: every root sends to every receiver.

use super::{Broadcast, Forest, ForestError, Members, Parent, Tree};
use crate::registry::Entry;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Broadcast> = Entry {
    name: "star",
    about: "Every server sends to every receiver: one hop, and the servers' links carry everything.",
    params: &[],
    example: "star",
    build: |spec| Ok(Box::new(spec.config::<Star>()?)),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Star {}

impl Broadcast for Star {
    fn forest(&self, members: &Members<'_>) -> Result<Forest, ForestError> {
        Ok(star(members))
    }
}

/// All receivers below every root.
pub(super) fn star(members: &Members<'_>) -> Forest {
    let parents = members.receivers.iter().map(|_| Parent::Root);
    Forest::shared(Tree::new(parents).expect("a star is a tree"), members.roots.len())
}
