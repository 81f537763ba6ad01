//! PowerSGD: one power iteration from where the last step ended, and what the product lacks is kept.

use super::matrix::{LowRank, Shape, Thin, dot};
use super::{Bound, Context, Stage};
use crate::kernels;
use crate::prng::Prng;
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "powersgd",
    about: "Each chunk, seen as a matrix, as a product of two thin ones (PowerSGD); with error feedback.",
    params: &[Param { name: "rank", default: Some("2"), about: "Columns of the thin matrices, 1 to 256." }],
    example: "powersgd:rank=2",
    build: |spec| {
        let spec = spec.with_positional("rank")?;
        let config: PowerSgd = spec.config()?;
        spec.require((1..=256).contains(&config.rank), || {
            format!("rank = {}: expected 1 to 256", config.rank)
        })?;
        Ok(Box::new(Stage::LowRank(Box::new(config))))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct PowerSgd {
    rank: u32,
}

impl Default for PowerSgd {
    fn default() -> PowerSgd {
        PowerSgd { rank: 2 }
    }
}

impl LowRank for PowerSgd {
    fn factor(&self, context: &Context<'_>, values: &[f32], memory: &mut [f32]) -> Option<Thin> {
        let shape = self.shape(context, values.len())?;
        let (rank, right_len) = (self.rank as usize, (shape.columns * shape.rank) as usize);
        let right = memory.get_mut(..right_len)?;
        if right.iter().all(|&value| value == 0.0) {
            let mut prng = Prng::new(context.seed);
            right.iter_mut().for_each(|value| *value = prng.normal() as f32);
        }
        let mut left = vec![0.0; shape.rows(values.len()) * rank];
        shape.times_right(values, right, &mut left);
        orthonormalise(&mut left, rank);
        shape.left_times(values, &left, right);
        left.extend_from_slice(right);
        Some(Thin { shape, values: left })
    }

    fn bound(&self) -> Bound {
        // A projection is never longer than what it projects. A little more for rounding.
        Bound { of_norm: 1.001, absolute: 0.0 }
    }
}

impl PowerSgd {
    /// The table's own rows if they are of use for a stretch of so many elements, else a square.
    fn shape(&self, context: &Context<'_>, entries: usize) -> Option<Shape> {
        let own = context.columns;
        let own = (own > 0).then(|| Shape {
            rank: self.rank,
            columns: u32::try_from(own).unwrap_or(u32::MAX),
            offset: (context.start % own as u64) as u32,
        });
        let square = Shape { rank: self.rank, columns: (entries as f64).sqrt().ceil() as u32, offset: 0 };
        own.into_iter()
            .chain([square])
            .filter(|shape| (1..=entries).contains(&(shape.columns as usize)))
            .find(|shape| shape.values(entries) < entries / 2)
    }
}

/// Gram-Schmidt on the columns of a matrix with rows of `rank` values. A column that depends on those before becomes 0.
fn orthonormalise(matrix: &mut [f32], rank: usize) {
    let rows = matrix.len() / rank;
    let mut columns: Vec<Vec<f32>> =
        (0..rank).map(|k| (0..rows).map(|row| matrix[row * rank + k]).collect()).collect();
    for k in 0..rank {
        let (done, rest) = columns.split_at_mut(k);
        let column = &mut rest[0];
        let before = kernels::squared_norm(column).sqrt();
        for other in done.iter() {
            let along = dot(column, other);
            kernels::add_scaled(column, other, -along);
        }
        let norm = kernels::squared_norm(column).sqrt();
        let is_new = norm > 1e-6 * before && norm.is_normal();
        // Divided, not multiplied by an inverse, which may overflow.
        column
            .iter_mut()
            .for_each(|value| *value = if is_new { (f64::from(*value) / norm) as f32 } else { 0.0 });
    }
    for (k, column) in columns.iter().enumerate() {
        for (row, value) in column.iter().enumerate() {
            matrix[row * rank + k] = *value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_of_low_rank_is_found_in_two_steps() {
        let (rows, columns) = (40, 60);
        let values: Vec<f32> = (0..rows * columns)
            .map(|at| {
                let (row, column) = ((at / columns) as f32, (at % columns) as f32);
                row.sin() * column.cos() + 0.5 * row.cos() * (column * 0.3).sin()
            })
            .collect();
        let context = Context { seed: 1, columns, ..Context::default() };
        let mut memory = vec![0.0; values.len()];
        let power = PowerSgd { rank: 2 };
        power.factor(&context, &values, &mut memory).unwrap();
        let thin = power.factor(&context, &values, &mut memory).unwrap();
        let mut product = vec![0.0; values.len()];
        thin.shape.product(&thin.values, &mut product);
        let error: f32 = values.iter().zip(&product).map(|(a, b)| (a - b).powi(2)).sum();
        assert!(error.sqrt() < 1e-3 * kernels::squared_norm(&values).sqrt() as f32, "{error}");
    }
}
