"""Values for JSON columns: no NumPy, and null for non-finite numbers (JSON has neither NaN nor infinity)."""

from typing import Any

import numpy as np
import orjson


def plain(value: Any) -> Any:
    """Convert *value*: arrays to lists, scalars and decimals to numbers, times to ISO 8601, non-finite to null.

    Raises TypeError for unsupported types.
    """
    return orjson.loads(orjson.dumps(value, _number, orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS))


def _number(value: Any) -> Any:
    """Return a decimal as a number, and an array that is not contiguous as a list."""
    return value.tolist() if isinstance(value, np.ndarray) else float(value)
