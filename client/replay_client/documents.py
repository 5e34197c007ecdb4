"""Documents: values of msgpack and numpy as JSON, for `--json` and the page of the dashboard."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Converts values of msgpack and numpy into values of JSON. NaN and infinities become None."""
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return (
        value
        if isinstance(value, str | int) or value is None
        else value.hex()
        if isinstance(value, bytes)
        else str(value)
    )


def dumps(document: object) -> bytes:
    """The document as compact JSON."""
    return json.dumps(plain(document), separators=(",", ":"), allow_nan=False).encode()
