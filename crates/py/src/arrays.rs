//! Memory of ours as numpy arrays, and numpy arrays as slices.

#![allow(unsafe_code, reason = "numpy is told about memory that Rust owns; see the comments")]

use crate::errors::raise;
use numpy::ndarray::ArrayView1;
use numpy::{PyArray1, PyReadonlyArrayDyn, PyReadwriteArrayDyn};
use pyo3::prelude::*;

/// An array over memory that `owner` keeps.
///
/// # Safety
///
/// `len` elements from `start` on MUST be there, at the same place, as long as `owner` lives.
pub(crate) unsafe fn view<'py>(
    start: *const f32,
    len: usize,
    owner: Bound<'py, PyAny>,
) -> Bound<'py, PyArray1<f32>> {
    // SAFETY: the caller's promise. The array holds on to its owner. Its contents may change under it, as those of any
    // numpy array may: no Rust reference to them outlives a call.
    unsafe {
        let elements = ArrayView1::from_shape_ptr(len, start);
        PyArray1::borrow_from_array(&elements, owner)
    }
}

/// The elements of an array, one after the other.
pub(crate) fn elements<'a>(array: &'a PyReadonlyArrayDyn<'_, f32>) -> PyResult<&'a [f32]> {
    array
        .as_slice()
        .map_err(|_| raise("ShapeError", "the array is not contiguous; use numpy.ascontiguousarray"))
}

/// The same, to be written.
pub(crate) fn elements_mut<'a>(array: &'a mut PyReadwriteArrayDyn<'_, f32>) -> PyResult<&'a mut [f32]> {
    array
        .as_slice_mut()
        .map_err(|_| raise("ShapeError", "`out` is not contiguous: parameters cannot be put there"))
}
