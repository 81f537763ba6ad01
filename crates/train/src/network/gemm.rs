//! Products of matrices: a safe face of `matrixmultiply`.

/// A matrix that is read: rows one after the other, or the transpose of such a one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// `values` as rows of `columns` values.
    pub(super) fn new(values: &'a [f32], columns: usize) -> Matrix<'a> {
        let rows = values.len() / columns;
        assert_eq!(rows * columns, values.len(), "whole rows of {columns}");
        Matrix { values, rows, columns, row_stride: columns, column_stride: 1 }
    }

    pub(super) fn transposed(self) -> Matrix<'a> {
        Matrix {
            values: self.values,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }
}

/// `c = a b`, where `c` has rows one after the other.
pub(super) fn multiply(a: Matrix<'_>, b: Matrix<'_>, c: &mut [f32]) {
    scaled_sum(a, b, 0.0, c);
}

/// `c += a b`, where `c` has rows one after the other.
pub(super) fn multiply_add(a: Matrix<'_>, b: Matrix<'_>, c: &mut [f32]) {
    scaled_sum(a, b, 1.0, c);
}

/// `c = a b + beta c`; with `beta` 0 what was in `c` is not read.
#[allow(unsafe_code)]
fn scaled_sum(a: Matrix<'_>, b: Matrix<'_>, beta: f32, c: &mut [f32]) {
    assert_eq!(a.columns, b.rows, "inner sides agree");
    assert_eq!(c.len(), a.rows * b.columns, "the product fits");
    // SAFETY: `Matrix::new` ties rows, columns and strides to the length of the slice, and transposing swaps them in
    // pairs, so every element addressed lies in its slice; `c` was measured above and is borrowed alone.
    unsafe {
        matrixmultiply::sgemm(
            a.rows,
            a.columns,
            b.columns,
            1.0,
            a.values.as_ptr(),
            a.row_stride as isize,
            a.column_stride as isize,
            b.values.as_ptr(),
            b.row_stride as isize,
            b.column_stride as isize,
            beta,
            c.as_mut_ptr(),
            b.columns as isize,
            1,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_transposes_and_sums() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, -1.0, 2.0, 1.0, 1.0]);
        let mut c = [f32::NAN; 4];
        multiply(Matrix::new(&a, 3), Matrix::new(&b, 2), &mut c);
        assert_eq!(c, [2.0, 7.0, 5.0, 16.0]);
        multiply_add(Matrix::new(&a, 3), Matrix::new(&b, 2), &mut c);
        assert_eq!(c, [4.0, 14.0, 10.0, 32.0]);
        multiply(Matrix::new(&a, 2).transposed(), Matrix::new(&b, 2), &mut c);
        assert_eq!(c, [3.0, 11.0, 4.0, 14.0]);
        multiply(Matrix::new(&a, 3), Matrix::new(&b, 3).transposed(), &mut c);
        assert_eq!(c, [-2.0, 7.0, -2.0, 19.0]);
    }

    #[test]
    #[should_panic(expected = "inner sides agree")]
    fn sides_that_do_not_fit_are_refused() {
        multiply(Matrix::new(&[0.0; 6], 3), Matrix::new(&[0.0; 4], 2), &mut [0.0; 4]);
    }
}
