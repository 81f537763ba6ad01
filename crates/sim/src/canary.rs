//! Planted bugs. A swarm that does not find them would not find real ones either.

mod broken;
mod copies;
mod shards;

pub use broken::Broken;
pub use copies::CopyBug;
pub use shards::ShardBug;

use paramill_core::consistency::{ClientSync, Consistency, Decision, PullView, SyncState};
use paramill_core::prng::Prng;
use paramill_core::registry::{Entry, Registry};
use paramill_core::spec::{Spec, SpecError};
use paramill_core::types::Clock;

/// A bug to plant in every shard or every worker of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Canary {
    /// A push that is sent again after a broken connection is applied again. Found by counting pushes.
    Forgetful,
    /// Pulls are answered at once, whatever the consistency model. Found by the staleness of answers.
    Hasty,
    /// Every tenth pull is forgotten. Found by the lack of progress.
    Absent,
    /// Worker 0 is sent other parameters than everybody else. Found by comparing what is sent of a version.
    Partial,
    /// A frame that waited is sent with the header that it was made with, though its payload is newer. Found by comparing
    /// what is sent of a version.
    Stale,
    /// A push is acknowledged when its first frame is here. Found by counting pushes when the rest does not come.
    Early,
    /// A gradient of an old epoch is taken as if it were of the present one. Found by pushes that fail: what one codec made is
    /// not what another reads.
    Outdated,
    /// An application reads what is received before all of it is here. Found by comparing what it reads.
    Reused,
    /// A shard's image lacks its last push. Found by counting pushes when another process goes on from it.
    Dated,
    /// A worker computes on a copy that is one round older than its model allows. Found by the age of what it computes on.
    Outlived,
    /// Whose gradients are in a sum is not remembered: when its aggregator dies, they are taken again. Found by counting pushes.
    Anonymous,
    /// A shard takes its copy to have what has only been sent to it. Found by counting pushes when the copy takes over.
    Ungated,
    /// A process that a shard was taken from goes on with it. Found by comparing which inputs both have.
    Stubborn,
}

impl Canary {
    /// All of them.
    pub const ALL: [Canary; 13] = [
        Canary::Forgetful,
        Canary::Hasty,
        Canary::Absent,
        Canary::Partial,
        Canary::Stale,
        Canary::Early,
        Canary::Outdated,
        Canary::Reused,
        Canary::Dated,
        Canary::Outlived,
        Canary::Anonymous,
        Canary::Ungated,
        Canary::Stubborn,
    ];

    /// Whether it is a bug of shards; else it is one of workers.
    pub fn is_of_shards(self) -> bool {
        !matches!(self, Canary::Reused | Canary::Outlived) && !self.is_of_copies()
    }

    /// Whether it is a bug between a shard and its copy.
    pub fn is_of_copies(self) -> bool {
        matches!(self, Canary::Ungated | Canary::Stubborn)
    }

    /// The components as workers with this bug know them.
    pub fn workers_registry(self) -> Registry {
        let mut registry = Registry::builtin();
        if self == Canary::Outlived {
            for name in ["ssp", "dsps", "pssp"] {
                let &Entry { name, about, params, example, .. } =
                    registry.consistency.entry(name).expect("it is a model");
                registry.consistency.register(Entry { name, about, params, example, build: build_lax });
            }
        }
        registry
    }
}

/// A model whose bound for copies is one round too high.
#[derive(Debug)]
struct Lax(Box<dyn Consistency>);

fn build_lax(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    Ok(Box::new(Lax(Registry::builtin().consistency.build(spec)?)))
}

impl Consistency for Lax {
    fn pull(&self, state: &SyncState, pull: &PullView, rng: &mut Prng) -> Decision {
        self.0.pull(state, pull, rng)
    }

    fn client_sync(&self) -> ClientSync {
        match self.0.client_sync() {
            ClientSync::Cached { bound } => ClientSync::Cached { bound: bound + 1 },
            other => other,
        }
    }

    fn version_needed(&self, clock: Clock) -> Option<Clock> {
        self.0.version_needed(clock)
    }
}
