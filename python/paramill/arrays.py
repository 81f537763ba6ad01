"""Arrays of other libraries as numpy arrays, without copies where the memory allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import DtypeError, ShapeError

FloatArray = npt.NDArray[np.float32]


def as_array(source: Any, what: str) -> FloatArray:
    """`source` as contiguous float32: numpy arrays, whatever knows DLPack or the buffer protocol, lists of numbers.

    >>> as_array(memoryview(bytes(8)).cast("f"), "a gradient")
    array([0., 0.], dtype=float32)
    >>> as_array(np.zeros(2), "a gradient")
    Traceback (most recent call last):
    paramill.errors.DtypeError: a gradient has dtype float64, expected float32; use .astype(numpy.float32)
    """
    array = _look(source, what)
    if array.dtype != np.float32:
        raise DtypeError(f"{what} has dtype {array.dtype}, expected float32; use .astype(numpy.float32)")
    return np.ascontiguousarray(array)


def as_output(target: Any, shape: tuple[int, ...], what: str) -> FloatArray:
    """`target` as an array that can be written where it is; it must have room for exactly `shape`."""
    array = _look(target, what)
    if array.dtype != np.float32:
        raise DtypeError(f"{what} has dtype {array.dtype}, expected float32")
    if array.size != np.prod(shape, dtype=np.int64):
        raise ShapeError(f"{what} has shape {array.shape}, expected {shape}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ShapeError(f"{what} is not contiguous or cannot be written: parameters cannot be put there")
    return array


def as_rows(source: Any) -> npt.NDArray[np.uint32]:
    """Row numbers, strictly ascending."""
    rows = np.asarray(source)
    if rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
        raise ShapeError(f"row numbers are a list of whole numbers, got shape {rows.shape} of {rows.dtype}")
    if rows.size and (rows.min() < 0 or rows.max() > np.iinfo(np.uint32).max):
        raise ShapeError(f"row numbers are 0 to 2^32 - 1, got {rows.min()} to {rows.max()}")
    return np.ascontiguousarray(rows, dtype=np.uint32)


def _look(source: Any, what: str) -> npt.NDArray[Any]:
    if isinstance(source, np.ndarray):
        return source
    if getattr(source, "requires_grad", False):
        source = source.detach()
    if hasattr(source, "__dlpack__"):
        if source.__dlpack_device__()[0] != 1:
            raise DtypeError(f"{what} is not in the host's memory; copy it there first, or use paramill.torch")
        try:
            # From a writable array numpy makes one that can be written only since 2.1; torch has its own way.
            return source.numpy() if hasattr(source, "numpy") else np.from_dlpack(source)
        except (BufferError, TypeError, RuntimeError) as error:
            raise DtypeError(f"{what} cannot be read: {error}") from error
    return np.asarray(source)
