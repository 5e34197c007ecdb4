"""Axes of columns: what the rows of an array in the extras of a group belong to.

Whoever cuts a group into sequences or rollouts cuts each array of its extras by its axis, and never by its shape: a
group of 8 completions with 8 tokens has arrays of one shape that mean different things. An array without an axis
belongs to the group as a whole. It is carried, and nobody cuts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client.columns.encoding import DTYPES

Array = npt.NDArray[Any]

RAGGED = "ragged:token"
AXES = {
    "token": "T, the tokens of completion_ids",
    "whole": "P + T, the tokens of prompt_ids and of completion_ids",
    "sequence": "S, the sequences",
    "rollout": "G, the rollouts",
    "group": "anything: the group as a whole",
    RAGGED: "T + 1 offsets into its values",
}
"""What the first dimension of an array counts, by its axis."""
OFFSETS = "/offsets"
"""The end of the name of the offsets that belong to an array with the axis "ragged:token"."""


def checked_columns(extras: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
    """The values as arrays of a dtype that the byte format has. Raises ValueError that names what is none."""
    columns: dict[str, Array] = {}
    for name, values in extras.items():
        try:
            columns[name] = array = np.asarray(values)
        # numpy raises these for a tensor on a GPU, in bfloat16, or in a graph.
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"extras[{name!r}] is no array of numpy: {error}; of a tensor take x.detach().cpu().numpy(), of one in "
                f"bfloat16 x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)"
            ) from None
        if array.dtype.name not in DTYPES:
            raise ValueError(f"extras[{name!r}] has dtype {array.dtype}, not one of {', '.join(DTYPES)}")
    return columns


def check_axes(extras: Mapping[str, Array], axes: Mapping[str, str], sizes: Mapping[str, int] | None = None) -> None:
    """Raises ValueError, with the remedy, for an axis that there is not, and for an array that does not fit its axis.

    `sizes`: the rows of "token", "whole", "sequence" and "rollout". Without it, arrays with one axis must agree.
    """
    known = dict(sizes or {})
    for name, axis in axes.items():
        if name not in extras:
            raise ValueError(f"axes names {name!r}, which extras does not have: add the array or leave the name out")
        if axis not in AXES:
            raise ValueError(f"axes[{name!r}] is {axis!r}, not one of {', '.join(AXES)}")
        if axis == "group":
            continue
        array = extras[name]
        if axis == RAGGED:
            _check_ragged(name, array, extras.get(name + OFFSETS), known)
            continue
        rows = array.shape[0] if array.ndim else None
        if rows is None or rows != known.setdefault(axis, rows):
            raise ValueError(
                f"extras[{name!r}] has the shape {array.shape}, and its axis {axis!r} needs {known.get(axis, 'some')} "
                f"rows ({AXES[axis]}): give it these rows or another axis"
            )
    for name in extras:
        if name.endswith(OFFSETS) and axes.get(name.removesuffix(OFFSETS)) != RAGGED:
            raise ValueError(
                f"extras[{name!r}] is the name of offsets, and extras has no {name.removesuffix(OFFSETS)!r} with the "
                f"axis {RAGGED!r}: choose another name or say this axis"
            )


def _check_ragged(name: str, values: Array, offsets: Array | None, known: dict[str, int]) -> None:
    """Raises ValueError unless `offsets` cut `values` into one set for each token."""
    if offsets is None:
        raise ValueError(
            f"extras[{name!r}] has the axis {RAGGED!r} and no offsets: put T + 1 of them into "
            f"extras[{name + OFFSETS!r}]"
        )
    tokens = known.setdefault("token", max(offsets.size - 1, 0))
    if offsets.dtype.kind not in "iu" or offsets.shape != (tokens + 1,):
        raise ValueError(
            f"extras[{name + OFFSETS!r}] is {offsets.dtype} of the shape {offsets.shape}, and must be integers of the "
            f"shape ({tokens + 1},): T + 1 offsets into extras[{name!r}]"
        )
    rows = values.shape[0] if values.ndim else 0
    if offsets[0] != 0 or offsets[-1] != rows or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(
            f"extras[{name + OFFSETS!r}] goes from {offsets[0]} to {offsets[-1]}, and must rise from 0 to the {rows} "
            f"rows of extras[{name!r}]"
        )
