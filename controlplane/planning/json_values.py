"""Values as JSON columns take them: no NumPy, and null for what is not finite (JSON has neither NaN nor infinity)."""

import math
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """*value* with arrays as lists, scalars and decimals as numbers, times in ISO 8601; null where it is not finite.

    Raises TypeError for what has no such form.
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
