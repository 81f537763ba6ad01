//! A worker's instances of the consistency models of a table.

use crate::consistency::{Admit, Ask, ClientUpdate, PartialPull, ServerPush, SyncPolicy};
use crate::types::{Clock, ServerId};
use std::collections::BTreeMap;

/// The model of a table, and those of servers that have rules of their own. None before there is a plan.
#[derive(Debug, Default)]
pub(super) struct Models {
    common: Option<SyncPolicy>,
    apart: BTreeMap<ServerId, SyncPolicy>,
}

impl Models {
    pub(super) fn new(common: SyncPolicy, apart: BTreeMap<ServerId, SyncPolicy>) -> Models {
        Models { common: Some(common), apart }
    }

    /// The model that holds for blocks of a server.
    fn on(&self, server: ServerId) -> Option<&SyncPolicy> {
        self.apart.get(&server).or(self.common.as_ref())
    }

    /// When the worker may go on without some of the blocks of a server, if it may.
    pub(super) fn partial_pull(&self, server: ServerId) -> Option<PartialPull> {
        self.on(server).and_then(SyncPolicy::partial_pull)
    }

    /// Whether the worker may go on without some blocks.
    pub(super) fn is_partial(&self) -> bool {
        self.common.iter().chain(self.apart.values()).any(|sync| sync.partial_pull().is_some())
    }

    /// The most rounds that a copy may lack where it is a cache. A copy is one of all servers, whose models may differ.
    pub(super) fn cache_bound(&self) -> Option<u64> {
        let apart = self.apart.values().map(SyncPolicy::cache_bound);
        apart.fold(self.common.as_ref()?.cache_bound(), |one, other| {
            one.zip(other).map(|(one, other)| one.min(other))
        })
    }

    /// The version that an iteration needs where versions are broadcast.
    pub(super) fn version_needed(&self, clock: Clock) -> Clock {
        self.common.as_ref().and_then(|sync| sync.model.version_needed(clock)).unwrap_or(clock)
    }

    /// Whether parameters are asked for after an update.
    pub(super) fn asks_after(&self, update: &ClientUpdate) -> bool {
        self.common.as_ref().map(|sync| sync.model.after_client_update(update)) != Some(Ask::Push)
    }

    /// Whether iterations are left out whose rounds are closed.
    pub(super) fn catches_up(&self) -> bool {
        self.common.as_ref().is_some_and(|sync| sync.model.catches_up())
    }

    /// Whether a server that is at this version drops a gradient of a clock.
    pub(super) fn drops(&self, server: ServerId, clock: Clock, version: Clock) -> bool {
        self.on(server).is_some_and(|sync| sync.model.admit(clock, version) == Admit::Late)
    }

    /// Whether a block of a server is taken.
    pub(super) fn takes(&self, server: ServerId, push: &ServerPush) -> bool {
        self.on(server).is_none_or(|sync| sync.model.after_server_push(push))
    }

    /// The text form of the model that most servers have.
    pub(super) fn text(&self) -> String {
        self.common.as_ref().map(ToString::to_string).unwrap_or_default()
    }
}
