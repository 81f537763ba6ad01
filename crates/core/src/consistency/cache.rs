//! A worker's copy of the parameters as a cache, which SSP and its descendants share: it is computed on as long as its age
//! allows, while pushes and pulls travel.

use super::ClientSync;
use crate::registry::Param;
use serde::Deserialize;

/// The parameter `cache`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Cache {
    /// A worker waits for an answer only when its copy is too old.
    #[default]
    On,
    /// A worker waits for an answer in every iteration (FluentPS, Algorithm 1).
    Off,
}

impl Cache {
    pub(super) const PARAM: Param = Param {
        name: "cache",
        default: Some("on"),
        about: "`on`: a worker computes on the copy that it has while the bound allows, and answers come meanwhile. `off`: every iteration waits for an answer.",
    };

    /// What a worker waits for under a model whose servers always answer where no more than `bound` rounds are missing.
    pub(super) fn client_sync(self, bound: u64) -> ClientSync {
        match self {
            Cache::On => ClientSync::Cached { bound },
            Cache::Off => ClientSync::AllBlocks,
        }
    }
}
