"""Values for JSON columns: no NumPy, and null for non-finite numbers (JSON has neither NaN nor infinity)."""

import math
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Convert *value*: arrays to lists, scalars and decimals to numbers, times to ISO 8601, non-finite to null.

    Raises TypeError for unsupported types.
    """
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case np.ndarray() | np.generic():
            return plain(value.tolist())
        case Decimal():
            return float(value)
        case datetime():
            return value.isoformat()
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no form in JSON")
