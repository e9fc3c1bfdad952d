"""Kernels that only kernels call in the product, as tests call them."""

from scheduling.compiled import compiled


def from_python(kernel):
    """Return *kernel*, of compiled callers only, for Python."""
    return compiled(kernel.py_func)
