"""Static sizes of calls: lists of slots are padded to a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def padded(values: Sequence[Any], size: int, fill: Any = 0, dtype: Any = np.int32) -> Any:
    """The values as an array [size], with `fill` in the places that are left."""
    return np.asarray([*values, *[fill] * (size - len(values))], dtype)
