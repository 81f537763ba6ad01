//! Defaults of the workloads.

use anyhow::{Result, anyhow};

/// What a workload is trained with when nothing else is said.
#[derive(Debug, Clone, Copy)]
pub(super) struct Defaults {
    name: &'static str,
    pub(super) optimizer: &'static str,
    pub(super) epochs: u64,
    pub(super) batch: usize,
}

const KNOWN: [Defaults; 4] = [
    Defaults { name: "lr", optimizer: "adagrad:lr=0.1", epochs: 5, batch: 128 },
    Defaults { name: "mf", optimizer: "adagrad:lr=0.1", epochs: 10, batch: 512 },
    Defaults { name: "mlp", optimizer: "momentum:lr=0.1", epochs: 3, batch: 32 },
    Defaults { name: "cnn", optimizer: "momentum:lr=0.05", epochs: 2, batch: 32 },
];

/// The workload of this name; the error lists those that exist.
pub(super) fn find(name: &str) -> Result<Defaults> {
    KNOWN.into_iter().find(|known| known.name == name).ok_or_else(|| {
        let known: Vec<&str> = KNOWN.iter().map(|known| known.name).collect();
        anyhow!("unknown workload `{name}`; known: {}", known.join(", "))
    })
}
