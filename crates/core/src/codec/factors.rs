//! Factors that a layer offers: a gradient that is a product by nature travels as one.

use super::matrix::{LowRank, Shape, Thin};
use super::{Bound, Context, Stage};
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "factors",
    about: "A gradient u v^T travels as u and v where its layer offers them and they are shorter; others as they are.",
    params: &[Param { name: "rank", default: Some("256"), about: "The most columns of u that are taken." }],
    example: "factors:rank=64",
    build: |spec| {
        let spec = spec.with_positional("rank")?;
        let config: Offered = spec.config()?;
        spec.require(config.rank > 0, || "rank = 0: expected at least 1".into())?;
        Ok(Box::new(Stage::LowRank(Box::new(config))))
    },
};

/// A table's gradient as a product `u v^T`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors<'a> {
    /// Columns of both matrices; the batch, for a fully connected layer.
    pub rank: u32,
    /// A row of `rank` values for every row of the table.
    pub u: &'a [f32],
    /// `rank` rows, each with a value for every column of the table.
    pub v: &'a [f32],
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Offered {
    rank: u32,
}

impl Default for Offered {
    fn default() -> Offered {
        Offered { rank: 256 }
    }
}

impl LowRank for Offered {
    fn factor(&self, context: &Context<'_>, values: &[f32], _memory: &mut [f32]) -> Option<Thin> {
        let factors = context.factors.filter(|factors| (1..=self.rank).contains(&factors.rank))?;
        let (columns, rank) = (context.columns, factors.rank as usize);
        if columns == 0 || columns > values.len() || factors.v.len() != rank * columns {
            return None;
        }
        let offset = (context.start % columns as u64) as u32;
        let shape = Shape { rank: factors.rank, columns: columns as u32, offset };
        if shape.values(values.len()) >= values.len() {
            return None;
        }
        let first = (context.start / columns as u64) as usize;
        let mut thin = factors.u.get(first * rank..(first + shape.rows(values.len())) * rank)?.to_vec();
        thin.extend_from_slice(factors.v);
        Some(Thin { shape, values: thin })
    }

    fn bound(&self) -> Bound {
        // The application made the product, and may have added in another order.
        Bound { of_norm: 1e-3, absolute: 0.0 }
    }

    fn keeps_residual(&self) -> bool {
        false
    }
}
