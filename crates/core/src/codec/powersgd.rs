//! PowerSGD: one power iteration from where the last step ended, and what the product lacks is kept.

use super::layer::LayerRange;
use super::matrix::{LowRank, Matrix, dot};
use super::products::{Shape, Thin};
use super::{Bound, Stage};
use crate::kernels;
use crate::prng::Prng;
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "powersgd",
    about: "Each layer, seen as a matrix, as a product of two thin ones (PowerSGD); with error feedback.",
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
    fn factor(&self, matrix: &Matrix<'_>, memory: &mut Vec<f32>) -> Option<Thin> {
        let shape = self.shape(matrix.layer)?;
        let (rank, right_len) = (self.rank as usize, (shape.columns * shape.rank) as usize);
        if memory.len() != right_len || memory.iter().all(|&value| value == 0.0) {
            let mut prng = Prng::new(matrix.seed);
            *memory = (0..right_len).map(|_| prng.normal() as f32).collect();
        }
        let mut left = vec![0.0; shape.rows(matrix.layer.elements.len()) * rank];
        matrix.times_right(shape, memory, &mut left);
        orthonormalise(&mut left, rank);
        matrix.left_times(shape, &left, memory);
        left.extend_from_slice(memory);
        Some(Thin { shape, values: left })
    }

    fn bound(&self) -> Bound {
        // A projection is never longer than what it projects. A little more for rounding.
        Bound { of_norm: 1.001, absolute: 0.0 }
    }
}

impl PowerSgd {
    /// The layer's own rows if they are of use, else a square.
    fn shape(&self, layer: &LayerRange) -> Option<Shape> {
        let elements = layer.elements.len();
        let columns = [layer.columns, (elements as f64).sqrt().ceil() as usize];
        columns
            .into_iter()
            .filter_map(|columns| Some(Shape { rank: self.rank, columns: u32::try_from(columns).ok()? }))
            .find(|shape| shape.values(elements).is_some_and(|values| values < elements / 2))
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
    use crate::codec::products::{PieceHead, Products};
    use crate::hands::Alone;

    #[test]
    fn a_matrix_of_low_rank_is_found_in_two_steps() {
        let (rows, columns) = (40, 60);
        let values: Vec<f32> = (0..rows * columns)
            .map(|at| {
                let (row, column) = ((at / columns) as f32, (at % columns) as f32);
                row.sin() * column.cos() + 0.5 * row.cos() * (column * 0.3).sin()
            })
            .collect();
        let (layer, power) = (LayerRange { elements: 0..values.len(), columns }, PowerSgd { rank: 2 });
        let mut memory = Vec::new();
        let mut step = || {
            let stretches = values.as_slice();
            let matrix = Matrix { layer: &layer, values: &stretches, factors: None, seed: 1, hands: &Alone };
            power.factor(&matrix, &mut memory).unwrap()
        };
        step();
        let (thin, mut products) = (step(), Products::default());
        products.take(
            PieceHead { layer: 0, shape: thin.shape, piece: 0 },
            &thin.values,
            std::slice::from_ref(&layer),
        );
        let mut product = vec![0.0; values.len()];
        products.fill(0, &[], &mut product);
        let error: f32 = values.iter().zip(&product).map(|(a, b)| (a - b).powi(2)).sum();
        assert!(error.sqrt() < 1e-3 * kernels::squared_norm(&values).sqrt() as f32, "{error}");
    }
}
