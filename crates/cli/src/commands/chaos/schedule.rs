//! Which process is killed when: a function of the seed.

use clap::ValueEnum;
use paramill_core::prng::Prng;
use serde::Serialize;
use std::collections::VecDeque;
use std::time::Duration;

/// Separates these draws from those of the job, which has the same seed.
const LABEL: u64 = 0xC4A0_5000;
/// A killed process is started anew after up to this long.
const LONGEST_AWAY_MS: u64 = 1500;

/// The kinds of processes of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Servers: one at a time, and the next one when every shard has its copy again.
    Servers,
    /// Workers.
    Workers,
    /// The coordinator.
    Coordinator,
    /// Aggregators.
    Aggregators,
    /// Workers that pass versions on to others at that moment (--broadcast).
    Relays,
}

impl Kind {
    /// As it is typed.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Servers => "servers",
            Kind::Workers => "workers",
            Kind::Coordinator => "coordinator",
            Kind::Aggregators => "aggregators",
            Kind::Relays => "relays",
        }
    }
}

/// How many processes of a kind there are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Victims {
    pub(super) kind: Kind,
    pub(super) count: u32,
}

/// One process to be killed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Kill {
    /// Since the job began to train.
    pub(super) at: Duration,
    pub(super) kind: Kind,
    /// Which one of its kind.
    pub(super) number: u32,
    /// How long nobody starts it anew.
    pub(super) away: Duration,
}

/// The kills of a run of this length, in the order of time, one in every `every` on average. Each kind has its turn before one has the
/// next: a rare kind would otherwise be killed a few times only.
pub(super) fn draw(seed: u64, victims: &[Victims], every: Duration, length: Duration) -> VecDeque<Kill> {
    let mut prng = Prng::fork(seed, LABEL);
    let victims: Vec<Victims> = victims.iter().copied().filter(|victims| victims.count > 0).collect();
    let (mut kills, mut at, mut turns) = (VecDeque::new(), Duration::ZERO, Vec::new());
    if victims.is_empty() || every.is_zero() {
        return kills;
    }
    loop {
        at += every.mul_f64(0.5 + prng.uniform());
        if at >= length {
            return kills;
        }
        if turns.is_empty() {
            turns = victims.clone();
            prng.shuffle(&mut turns);
        }
        let Some(Victims { kind, count }) = turns.pop() else { return kills };
        let number = prng.below(u64::from(count)) as u32;
        let away = Duration::from_millis(prng.below(LONGEST_AWAY_MS));
        kills.push_back(Kill { at, kind, number, away });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const ALL: [Victims; 4] = [
        Victims { kind: Kind::Servers, count: 3 },
        Victims { kind: Kind::Workers, count: 4 },
        Victims { kind: Kind::Coordinator, count: 1 },
        Victims { kind: Kind::Aggregators, count: 1 },
    ];
    const EVERY: Duration = Duration::from_millis(4500);

    fn drawn(seed: u64) -> VecDeque<Kill> {
        draw(seed, &ALL, EVERY, Duration::from_secs(600))
    }

    #[test]
    fn ten_minutes_have_a_hundred_kills_and_ten_of_each_kind() {
        for seed in 0..200 {
            let mut kinds = BTreeMap::new();
            drawn(seed).iter().for_each(|kill| *kinds.entry(kill.kind).or_insert(0) += 1);
            let all: u32 = kinds.values().sum();
            assert!(all >= 100 && kinds.len() == 4 && kinds.values().all(|kills| *kills >= 20), "{kinds:?}");
        }
    }

    #[test]
    fn the_seed_says_everything() {
        assert_eq!(drawn(7), drawn(7));
        assert_ne!(drawn(7), drawn(8));
    }

    #[test]
    fn kills_are_in_order_and_of_processes_that_there_are() {
        let kills = drawn(3);
        assert!(kills.iter().zip(kills.iter().skip(1)).all(|(one, next)| one.at < next.at));
        for Kill { kind, number, at, .. } in kills {
            let count = ALL.iter().find(|victims| victims.kind == kind).map_or(0, |victims| victims.count);
            assert!(number < count && at < Duration::from_secs(600));
        }
    }

    #[test]
    fn a_job_without_aggregators_has_none_killed() {
        let victims = [Victims { kind: Kind::Aggregators, count: 0 }, ALL[1]];
        let kills = draw(1, &victims, EVERY, Duration::from_secs(60));
        assert!(!kills.is_empty() && kills.iter().all(|kill| kill.kind == Kind::Workers));
        assert!(draw(1, &victims[..1], EVERY, Duration::from_secs(60)).is_empty());
    }
}
