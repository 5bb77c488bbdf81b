"""The row-sparse arrays of ``heddle.sparse``, under the name that MXNet has for them."""

from ..sparse import RowSparseNDArray, array, retain, row_sparse_array, zeros

__all__ = ["RowSparseNDArray", "array", "retain", "row_sparse_array", "zeros"]
