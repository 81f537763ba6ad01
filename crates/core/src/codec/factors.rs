//! Factors that a layer offers: a gradient that is a product by nature travels as one.

use super::matrix::{LowRank, Matrix};
use super::products::{Shape, Thin};
use super::{Bound, Stage};
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
    fn factor(&self, matrix: &Matrix<'_>, _memory: &mut Vec<f32>) -> Option<Thin> {
        let factors = matrix.factors.filter(|factors| (1..=self.rank).contains(&factors.rank))?;
        let (elements, rank) = (matrix.layer.elements.len(), factors.rank as usize);
        let shape = Shape { rank: factors.rank, columns: u32::try_from(matrix.layer.columns).ok()? };
        shape.values(elements)?;
        let fits = factors.u.len() == shape.rows(elements) * rank
            && factors.v.len() == rank * shape.columns as usize;
        fits.then(|| Thin { shape, values: [factors.u, factors.v].concat() })
    }

    fn bound(&self) -> Bound {
        // The application made the product, and may have added in another order.
        Bound { of_norm: 1e-3, absolute: 0.0 }
    }

    fn keeps_residual(&self) -> bool {
        false
    }

    fn needs_offer(&self) -> bool {
        true
    }
}
