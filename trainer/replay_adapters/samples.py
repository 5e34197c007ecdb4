"""SampleStore: the samples of slime and of Miles as groups, and the same samples back, bit by bit.

Miles is a fork of slime, and both have a dataclass `Sample` with the same names for tokens, log-probabilities, masks
and rewards. What a trainer of groups can read becomes arrays of the group, with their axes:

    tokens, response_length          prompt_ids, contexts and completions
    rollout_log_probs, loss_mask     rollout_logprobs, loss_mask (False where `remove_sample` is set)
    rollout_routed_experts, ...      extras with the axis "whole": uint8 where the numbers allow it
    teacher_log_probs, ...           extras with the axis "token"
    rollout_top_p_token_ids          an extra with the axis "ragged:token"
    a rollout that is a list         sequence_counts

All other fields travel in one array without an axis, packed by msgpack: nobody cuts it, and nothing needs to know them.
A value that its array cannot hold exactly, such as a log-probability that float32 rounds, is packed as well, so samples
come back as they were. Unpacking makes plain values, arrays, and the dataclasses of the module of `Sample`; it runs
nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from replay_client import RolloutGroup, group_from_rows, row_of
from replay_client.columns import RAGGED as RAGGED_AXIS
from replay_client.rollout import MAX_LOGPROB, MAX_VALUE
from replay_client.scoring import group_advantages

Array = npt.NDArray[Any]
Rollout = Any
"""A sample, or a list of samples: what one execution of the policy left."""

WHOLE = ("rollout_routed_experts", "rollout_indexer_topk")
"""Fields with a row for each token of prompt and response, or for all but the last one."""
TOKEN = ("teacher_log_probs", "opd_reverse_kl")
"""Fields with a value for each token of the response."""
RAGGED = {"rollout_top_p_token_ids": "rollout_top_p_token_offsets"}
"""Fields with a set for each token of the response: the values, and the field with the offsets."""
_IN_ARRAYS = ("tokens", "response_length", "rollout_log_probs", "loss_mask")
"""Fields that come from the arrays of a group, unless they are packed."""
PACKED = "samples"
"""The extra that holds everything else."""
_NO_PROMPT = 0
"""The token that stands for the prompt of a sample that has none, because it failed."""
_FORMS = "/forms"
"""Among the packed fields of a sample: what those were that are rows of a column now."""
_IMAGE_MODES = ("L", "RGB", "RGBA")
"""Images that their pixels describe completely."""
_ARRAY, _TENSOR, _TUPLE, _OBJECT, _IMAGE = range(1, 6)


def samples_of(rollout: Rollout) -> list[Any]:
    """The samples of a rollout. One that may fan out into several is a list, also if it has only one."""
    return rollout if isinstance(rollout, list) else [rollout]


class SampleStore:
    """Converts the groups of one framework. `sample_class`: its Sample. `reward_key`: that of its arguments."""

    def __init__(self, sample_class: type[Any], reward_key: str | None = None) -> None:
        self._class = sample_class
        self._module = sys.modules[sample_class.__module__]
        self._reward_key = reward_key
        self._fields = {each.name: each.default for each in dataclasses.fields(sample_class)}

    def reward(self, sample: Any) -> float:
        """The reward that the framework trains on; NaN if the sample has none, because it failed."""
        reward = sample.reward
        if self._reward_key:
            reward = reward.get(self._reward_key) if isinstance(reward, dict) else None
        try:
            return float(reward)
        except (TypeError, ValueError):
            return math.nan

    def group_of(
        self, rollouts: Sequence[Rollout], version: int, more: Mapping[str, Any] | None = None
    ) -> RolloutGroup:
        """The rollouts of one prompt as a group. `more`: what comes back with them from `read`.

        A rollout without a finite reward counts as 0 in the group. Raises ValueError that names a field which cannot be
        stored, and for a rollout without samples.
        """
        lists = list(map(samples_of, rollouts))
        if not lists or not all(lists):
            raise ValueError("the group has a rollout without samples: return at least one sample for each rollout")
        samples = [sample for each in lists for sample in each]
        rows = [_Row.of(sample) for sample in samples]
        columns, forms = _columns(samples, rows)
        rewards = [self._rollout_reward(each) for each in lists]
        packed = {
            "samples": [
                self._rest(sample, row.exact | set(form)) | {_FORMS: self._packb(form)}
                for sample, row, form in zip(samples, rows, forms, strict=True)
            ],
            "lists": [isinstance(each, list) for each in rollouts],
            "more": self._pack("groups", "prompt group", dict(more or {})),
        }
        return group_from_rows(
            prompts=[row.prompt for row in rows],
            completions=[row.completion for row in rows],
            logprobs=[row.logprobs for row in rows],
            loss_masks=[row.mask for row in rows],
            rewards=rewards,
            advantages=group_advantages(rewards),
            columns=columns,
            policy_version=version,
            sequence_counts=[len(each) for each in lists] if any(len(each) > 1 for each in lists) else None,
            finish_reasons=tuple(_finish_reason(each[-1]) for each in lists),
            extras={PACKED: np.frombuffer(msgpack.packb(packed), np.uint8)},
        )

    def read(self, group: RolloutGroup) -> tuple[list[Rollout], dict[str, Any]] | None:
        """The rollouts that `group_of` got, and its `more`; None if the group is not from there."""
        try:
            packed = msgpack.unpackb(group.extras[PACKED].tobytes())
            fields_S = [{name: self._unpackb(each[name]) for name in each} for each in packed["samples"]]
            more, lists_G = self._unpackb(packed["more"]), packed["lists"]
            sizes = len(fields_S), len(lists_G)
            sound = sizes == (group.num_sequences, group.group_size) and all(_FORMS in each for each in fields_S)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, msgpack.UnpackException):
            return None
        if not sound:
            return None
        rows = zip(fields_S, group.prompts(), group.sampled_spans(), strict=True)
        samples = iter([self._sample(group, k, *row) for k, row in enumerate(rows)])
        counts_G = np.bincount(group.sequence_rollouts).tolist()
        rollouts = [list(itertools.islice(samples, count)) for count in counts_G]
        return [each if is_list else each[0] for each, is_list in zip(rollouts, lists_G, strict=True)], more

    def _rollout_reward(self, samples: Sequence[Any]) -> float:
        """Siblings usually have the reward of their rollout, and their mean is that one."""
        rewards = [reward for sample in samples if abs(reward := self.reward(sample)) <= MAX_VALUE]
        return math.fsum(rewards) / len(rewards) if rewards else 0.0

    # ------------------------------------------------------------------------------------------------ all other fields

    def _rest(self, sample: Any, elsewhere: set[str]) -> dict[str, bytes]:
        """The fields that no array has, with attributes that somebody added. Those that are unset are left out."""
        return {
            name: self._pack("samples", name, value)
            for name, value in vars(sample).items()
            if name not in elsewhere and (name in _IN_ARRAYS or value is not self._fields.get(name, self))
        }

    def _sample(self, group: RolloutGroup, k: int, fields: Mapping[str, Any], prompt: Array, span: slice) -> Any:
        """Row k, which has this prompt and the tokens of `span`, as a sample."""
        assert group.loss_mask is not None
        values: dict[str, Any] = {
            "tokens": [*prompt.tolist(), *group.completion_ids[span].tolist()],
            "response_length": span.stop - span.start,
            "rollout_log_probs": group.rollout_logprobs[span].tolist(),
            "loss_mask": group.loss_mask[span].astype(int).tolist(),
        }
        for name, form in fields[_FORMS].items():
            row = row_of(group, name, k) if name in group.extras else None
            if isinstance(row, tuple):
                values[name], values[RAGGED[name]] = (_formed(part, *form[i]) for i, part in enumerate(row))
            elif row is not None:
                values[name] = _formed(row, *form)
        values |= {name: value for name, value in fields.items() if name != _FORMS}
        return _made(self._class, values)

    def _pack(self, whose: str, name: str, value: Any) -> bytes:
        try:
            return self._packb(value)
        except (AttributeError, TypeError, ValueError, OverflowError, RuntimeError):
            framework = self._class.__module__.split(".")[0]
            raise ValueError(
                f"{framework}'s {whose} have a {name} that cannot be stored, {_shown(value)}: put numbers, texts, "
                f"arrays, lists and dicts of them into it"
            ) from None

    def _packb(self, value: Any) -> bytes:
        return bytes(msgpack.packb(value, default=self._packed, strict_types=True))

    def _unpackb(self, packed: bytes) -> Any:
        return msgpack.unpackb(packed, ext_hook=self._unpacked, strict_map_key=False)

    def _packed(self, value: Any) -> Any:
        """A value that msgpack does not know, as one that it does. Raises TypeError for others."""
        kind = type(value)
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
            is_number = isinstance(value, np.generic)
            return self._extension(_ARRAY, [is_number, value.dtype.str, list(value.shape), value.tobytes()])
        if kind is tuple:
            return self._extension(_TUPLE, list(value))
        if (isinstance(value, enum.Enum) or dataclasses.is_dataclass(kind)) and self._named(kind.__qualname__) is kind:
            content = value.value if isinstance(value, enum.Enum) else vars(value)
            return self._extension(_OBJECT, [kind.__qualname__, content])
        if _is_tensor(value):
            from safetensors.torch import save

            return self._extension(_TENSOR, save({"": value.detach().cpu().contiguous()}))
        if kind.__module__.startswith("PIL.") and value.mode in _IMAGE_MODES:
            return self._extension(_IMAGE, [value.mode, list(value.size), value.tobytes()])
        raise TypeError(f"{kind.__name__} cannot be packed")

    def _extension(self, code: int, content: list[Any] | bytes) -> msgpack.ExtType:
        return msgpack.ExtType(code, self._packb(content))

    def _unpacked(self, code: int, data: bytes) -> Any:
        content = self._unpackb(data)
        if code == _TUPLE:
            return tuple(content)
        if code == _ARRAY:
            is_number, dtype, shape, raw = content
            array = np.frombuffer(raw, _plain(dtype)).reshape(shape)
            return array[()] if is_number else array.copy()
        if code == _TENSOR:
            from safetensors.torch import load

            return load(content)[""]
        if code == _IMAGE:
            from PIL import Image

            mode, size, raw = content
            return Image.frombytes(mode, tuple(size), raw)
        kind = self._named(content[0])
        if code == _OBJECT and isinstance(kind, type) and issubclass(kind, enum.Enum):
            return kind(content[1])
        if code == _OBJECT and isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return _made(kind, content[1])
        raise ValueError(f"{content[0]!r} is no class of {self._module.__name__}")

    def _named(self, qualname: str) -> Any:
        """What the module of the sample class has under this name."""
        found: Any = self._module
        for part in qualname.split("."):
            found = getattr(found, part, None)
        return found


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except RecursionError:
        return reprlib.repr(value)  # some levels of it


def _made(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A dataclass with these fields, and with attributes that are no fields."""
    fields = {each.name for each in dataclasses.fields(kind)}
    made = kind(**{name: value for name, value in values.items() if name in fields})
    for name in values.keys() - fields:
        setattr(made, name, values[name])
    return made


@dataclasses.dataclass
class _Row:
    """What a group has of one sample."""

    prompt: Array
    completion: Array
    logprobs: Array
    mask: Array
    exact: set[str]
    """The fields of the sample that these arrays hold as they are."""

    @classmethod
    def of(cls, sample: Any) -> _Row:
        exact = set()
        tokens, length = _ids(sample.tokens), sample.response_length
        if tokens is not None and isinstance(length, int) and 0 <= length < tokens.size:
            exact |= {"tokens", "response_length"}
            prompt, completion = tokens[: tokens.size - length], tokens[tokens.size - length :]
        else:  # nothing of it can be trained on: it failed before it had a response
            prompt, completion = np.array([_NO_PROMPT], np.int32), np.zeros(0, np.int32)
        logprobs = np.full(completion.size, np.nan, np.float32)
        known = _numbers(sample.rollout_log_probs, "f")
        if known is not None and known.shape == logprobs.shape and (known <= MAX_LOGPROB).all():
            with np.errstate(over="ignore"):
                narrow = known.astype(np.float32)
            if np.isfinite(narrow).all():
                logprobs = narrow
                exact |= {"rollout_log_probs"} if (narrow == known).all() and type(known) is np.ndarray else set()
        mask = np.ones(completion.size, np.bool_)
        loss_mask = _numbers(sample.loss_mask, "iu")
        if loss_mask is not None and loss_mask.shape == mask.shape:
            mask = loss_mask != 0
            # A removed sample is masked in the group, and has its own mask back.
            if not sample.remove_sample and ((loss_mask == 0) | (loss_mask == 1)).all():
                exact.add("loss_mask")
        if sample.remove_sample:
            mask = np.zeros_like(mask)
        return cls(prompt, completion, logprobs, mask, exact)


def _ids(tokens: Any) -> npt.NDArray[np.int32] | None:
    array = _numbers(tokens, "iu")
    if array is None or not array.size or array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        return None
    return array.astype(np.int32)


def _numbers(values: Any, kinds: str) -> Array | None:
    """A list of numbers as an array of one dimension; None for anything else. An empty list is one of any kind."""
    if type(values) is not list:
        return None
    if not values:
        return np.zeros(0, np.float64 if kinds == "f" else np.int64)
    array = _array(values)
    return array if array is not None and array.ndim == 1 and array.dtype.kind in kinds else None


def _finish_reason(sample: Any) -> str:
    status = str(sample.status.value)
    return {"truncated": "length", "completed": "stop", "pending": "stop"}.get(status, status)


# ------------------------------------------------------------------------------------------------ fields of each token


Forms = dict[str, Any]
"""What a field was before it became rows of a column, by its name."""


def _columns(samples: Sequence[Any], rows: Sequence[_Row]) -> tuple[dict[str, tuple[str, list[Any]]], list[Forms]]:
    """The columns of the fields that all these samples have for each token, and their forms.

    A field that one sample lacks, because it failed, has zeros there. A field whose sizes fit no axis is no column.
    """
    columns: dict[str, tuple[str, list[Any]]] = {}
    forms: list[Forms] = [{} for _ in samples]
    for name in (*WHOLE, *TOKEN):
        # The last token was routed to nobody: it is not fed to the model again.
        axis, short = ("whole", 1) if name in WHOLE else ("token", 0)
        sizes = [row.completion.size + (row.prompt.size if name in WHOLE else 0) for row in rows]
        values = [getattr(sample, name, None) for sample in samples]
        arrays = list(map(_array, values))
        present = [array for array in arrays if array is not None]
        fits = [
            value is None if array is None else size - short <= len(array) <= size
            for value, array, size in zip(values, arrays, sizes, strict=True)
        ]
        if not present or not all(fits) or len({array.shape[1:] for array in present}) > 1:
            continue
        filled = [np.zeros((size, *present[0].shape[1:]), narrowest(present)) for size in sizes]
        for k, array in enumerate(arrays):
            if array is not None:
                filled[k][: len(array)] = array
                forms[k][name] = _form(values[k], array)
        columns[name] = (axis, filled)
    for name, of_offsets in RAGGED.items():
        pairs = [(_array(getattr(each, name, None)), _array(getattr(each, of_offsets, None))) for each in samples]
        present = [ids for ids, _ in pairs if ids is not None]
        if not present or not all(map(_is_ragged, pairs, rows)):
            continue
        dtype = narrowest(present, least=np.int32)
        sets: list[tuple[Array, Array]] = []
        for sample, row, form, (ids, offsets) in zip(samples, rows, forms, pairs, strict=True):
            if ids is None or offsets is None:
                sets.append((np.zeros(0, dtype), np.zeros(row.completion.size + 1, np.int64)))
            else:
                sets.append((ids.astype(dtype), offsets))
                form[name] = [_form(getattr(sample, name), ids), _form(getattr(sample, of_offsets), offsets)]
                form[of_offsets] = None
        columns[name] = (RAGGED_AXIS, sets)
    return columns, forms


def _is_ragged(pair: tuple[Array | None, Array | None], row: _Row) -> bool:
    """Whether values and offsets are there and fit the response, or neither is there."""
    values, offsets = pair
    if values is None or offsets is None:
        return values is None and offsets is None
    return (
        values.ndim == offsets.ndim == 1
        and values.dtype.kind in "iu"
        and offsets.dtype.kind in "iu"
        and offsets.size == row.completion.size + 1
        and int(offsets[0]) == 0
        and int(offsets[-1]) == values.size
        and bool((offsets[1:] >= offsets[:-1]).all())
    )


def _array(value: Any) -> Array | None:
    """The numbers of a list, an array or a tensor; None if they are not those of an array that a group can hold."""
    if _is_tensor(value):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            return None
        value = value.numpy()
    if not isinstance(value, list | np.ndarray):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        return None
    return array if array.ndim and array.dtype.kind in "iuf" and array.dtype.isnative else None


def narrowest(arrays: Sequence[Array], least: Any = np.uint8) -> np.dtype[Any]:
    """The smallest dtype that holds all these numbers exactly, `least` or more."""
    dtype = np.result_type(*arrays)
    if dtype.kind == "f":
        exact = all((array.astype(np.float32) == array).all() for array in arrays)
        return np.dtype(np.float32) if exact and dtype == np.float64 else dtype
    low = min((int(array.min()) for array in arrays if array.size), default=0)
    high = max((int(array.max()) for array in arrays if array.size), default=0)
    for kind in (np.uint8, np.int32):
        info = np.iinfo(kind)
        if np.iinfo(kind).bits >= np.iinfo(least).bits and info.min <= low and high <= info.max:
            return np.dtype(kind)
    return np.dtype(np.int64)


def _form(value: Any, array: Array) -> list[Any]:
    """What `_formed` needs to make `value`, whose numbers are those of `array`."""
    kind = "list" if isinstance(value, list) else "numpy" if isinstance(value, np.ndarray) else "torch"
    return [kind, array.dtype.str, len(array)]


def _formed(row: Array, form: str, dtype: str, length: int) -> Any:
    """A row of a column as what the sample had."""
    array = np.array(row[:length], dtype=_plain(dtype))
    if form == "list":
        return array.tolist()
    if form == "torch":
        import torch

        return torch.from_numpy(array)
    return array


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _plain(dtype: str) -> np.dtype[Any]:
    """The dtype of numbers with this name. Raises ValueError for others."""
    found = np.dtype(dtype)
    if found.kind not in "biuf":
        raise ValueError(f"{dtype!r} is no dtype of numbers")
    return found
