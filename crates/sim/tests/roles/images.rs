//! Images of shards: what was damaged on its way is refused, and what was not is the same shard.

use paramill_core::prng::Prng;
use paramill_core::registry::Registry;
use paramill_core::server::{Shard, ShardConfig, ShardImage};
use paramill_core::types::{ProcessId, ServerId, ShardId, TableId, Time};
use paramill_sim::cluster::Cluster;
use paramill_sim::scenario::Scenario;
use paramill_sim::world::Unobserved;
use std::sync::Arc;

const SHARD: ShardId = ShardId { server: ServerId(0), core: 0 };

fn config() -> ShardConfig {
    ShardConfig {
        job: "simulated".into(),
        process: ProcessId(0),
        server: None,
        core: 0,
        cores: 1,
        addresses: "shard".to_owned().into(),
        coordinator: "coordinator".into(),
        digest_every: 1,
    }
}

fn restored(image: ShardImage) -> Result<Shard, String> {
    Shard::from_image(Time::ZERO, config(), Arc::new(Registry::builtin()), image)
}

/// A shard in the middle of a job, with rounds open.
fn job(more: &str) -> Cluster {
    let text = format!(
        "workers = 3\niterations = 40\n{more}\n[[tables]]\nname = 'w'\nshape = [300]\n\
         [[tables]]\nname = 'emb'\nshape = [40, 4]\nrows = true\n"
    );
    let scenario = Scenario::parse(&text).expect("a scenario");
    let mut cluster = Cluster::new(&scenario).expect("it can be set up");
    cluster.run(Time::from_secs_f64(0.1003), &mut Unobserved).expect("nothing is observed");
    cluster
}

fn jobs() -> impl Iterator<Item = Cluster> {
    let ways = [
        "order = 'arrival'\noptimizer = 'adam:lr=0.01'",
        "order = 'ranked'\nsync = 'quorum:q=0.6,late=weigh'",
        "order = 'arrival'\nsync = 'pssp:s=1,c=0.5'\ncodec = 'topk:0.2'",
        "order = 'ranked'\nbroadcast = 'star'\nanswer_codec = 'topk:0.1'\noptimizer = 'momentum:lr=0.1'",
        "order = 'arrival'\naggregators = 1",
    ];
    ways.into_iter().map(job)
}

#[test]
fn a_shard_made_of_an_image_has_the_same_image() {
    for cluster in jobs() {
        let bytes = cluster.shard(SHARD).image().encode();
        let image = ShardImage::decode(&bytes).unwrap();
        let shard = restored(image.clone()).unwrap();
        assert_eq!(shard.image().encode(), bytes);
        for (id, table) in image.tables() {
            let store = table.store();
            let elements: u64 = store.chunks().iter().map(|chunk| chunk.len).sum();
            assert_eq!((store.is_initialised(), store.parameters().len() as u64), (true, elements));
            assert!(store.slots().all(|slot| slot.len() as u64 == elements));
            let (mut at, parameters) = (0, store.parameters());
            cluster.shard(SHARD).for_each_chunk(id, |start, values| {
                let chunk = store.chunks()[at];
                let before: u64 = store.chunks()[..at].iter().map(|chunk| chunk.len).sum();
                assert_eq!((chunk.start, chunk.len), (start, values.len() as u64));
                assert_eq!(&parameters[before as usize..][..values.len()], values);
                at += 1;
            });
        }
    }
}

#[test]
fn parameters_and_optimizer_state_are_taken_over_from_an_image() {
    let cluster = job("order = 'arrival'\noptimizer = 'adam:lr=0.01'");
    let image = cluster.shard(SHARD).image();
    let mut other =
        restored(job("order = 'arrival'\noptimizer = 'adam:lr=0.02'").shard(SHARD).image()).unwrap();
    for (number, table) in (0..).zip(image.clone().into_tables()) {
        let store = table.into_store();
        other.restore_store(TableId(number), store.clone()).unwrap();
        assert_eq!(other.image().into_tables()[number as usize].store(), &store);
        assert!(other.restore_store(TableId(1 - number), store).is_err(), "it is of another table");
    }
}

/// Flipped bits, missing ends and lengths of everything: there is an error, or a shard whose account of itself adds up.
#[test]
fn a_damaged_image_is_refused_or_is_one() {
    let mut dice = Prng::new(17);
    for cluster in jobs() {
        let bytes = cluster.shard(SHARD).image().encode();
        for _ in 0..3000 {
            let mut damaged = bytes.clone();
            // Most of an image are parameters, which may be anything: what is small lies at the beginning and in between.
            let at = dice.below(damaged.len() as u64) as usize;
            match dice.below(4) {
                0 => damaged.truncate(at),
                1 => damaged[at] ^= 1 << dice.below(8),
                2 => damaged[at] = 0xff,
                _ => {
                    let end = (at + 10).min(damaged.len());
                    damaged[at..end].fill(0xff);
                }
            }
            if let Ok(image) = ShardImage::decode(&damaged)
                && let Ok(shard) = restored(image)
            {
                paramill_core::role::Role::check(&shard).unwrap();
            }
        }
        assert!(ShardImage::decode(&[&bytes[..], &[0]].concat()).is_err(), "something follows");
        assert!(ShardImage::decode(b"").is_err() && ShardImage::decode(b"PMI\x00").is_err());
    }
}
