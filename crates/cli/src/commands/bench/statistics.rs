//! Medians and spreads.

use serde::Serialize;

/// The middle of several measurements, and how far they lie apart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Spread {
    /// Of at least one value.
    pub(super) fn of(values: &[f64]) -> Spread {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            0 => (sorted[middle - 1] + sorted[middle]) / 2.0,
            _ => sorted[middle],
        };
        Spread { median, min: sorted[0], max: sorted[sorted.len() - 1] }
    }

    /// For people: `4.71 [4.48–5.16]`.
    pub(super) fn words(&self) -> String {
        format!("{:.2} [{:.2}–{:.2}]", self.median, self.min, self.max)
    }
}

/// The value that a share of `q` of the sorted values do not exceed.
pub(super) fn quantile(sorted: &[u32], q: f64) -> u32 {
    let rank = (q * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_few_and_many() {
        assert_eq!(Spread::of(&[3.0]), Spread { median: 3.0, min: 3.0, max: 3.0 });
        assert_eq!(Spread::of(&[3.0, 1.0]).median, 2.0);
        assert_eq!(Spread::of(&[9.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 9.0 });
        let hundred: Vec<u32> = (1..=100).collect();
        assert_eq!((quantile(&hundred, 0.5), quantile(&hundred, 0.99)), (50, 99));
        assert_eq!((quantile(&[7], 0.99), quantile(&[], 0.5)), (7, 0));
    }
}
