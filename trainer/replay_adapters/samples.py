"""SampleStore: converts the samples of slime or Miles to groups, and groups back to the same samples, bit by bit.

Miles is a fork of slime, and both have a dataclass `Sample` with the same names for tokens, log-probabilities, masks
and rewards. The fields that a trainer of groups can read become arrays of the group, with their axes:

    tokens, response_length          prompt_ids, contexts and completions
    rollout_log_probs, loss_mask     rollout_logprobs, loss_mask (False where `remove_sample` is set)
    rollout_routed_experts, ...      extras with the axis "whole": uint8 where the numbers allow it
    teacher_log_probs, ...           extras with the axis "token"
    rollout_top_p_token_ids          an extra with the axis "ragged:token"
    a rollout that is a list         sequence_counts

All other fields are packed into one array without an axis, which only this module reads (`plain_values`). A value that
an array of the group cannot hold exactly, such as a log-probability that float32 rounds, is packed as well, so that
samples come back unchanged. Unpacking makes only plain values, arrays, tensors, images, and enums and dataclasses of
the module of `Sample`. It runs no code from the data.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import reprlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from replay_adapters.plain_values import ValueCodec
from replay_client import RolloutGroup, group_from_rows, row_of
from replay_client.columns import RAGGED as RAGGED_AXIS
from replay_client.rollout import MAX_LOGPROB, MAX_VALUE
from replay_client.scoring import group_advantages

Array = npt.NDArray[Any]
Rollout = Any
"""The result of one execution of the policy: a sample, or a list of samples."""

WHOLE = ("rollout_routed_experts", "rollout_indexer_topk")
"""Fields with a row for each token of prompt and response, or for all but the last token."""
TOKEN = ("teacher_log_probs", "opd_reverse_kl")
"""Fields with a value for each token of the response."""
RAGGED = {"rollout_top_p_token_ids": "rollout_top_p_token_offsets"}
"""Fields with a set of values for each token of the response: name of the field -> name of the field with the
offsets."""
_IN_ARRAYS = ("tokens", "response_length", "rollout_log_probs", "loss_mask")
"""Fields that come from the arrays of a group, unless they are packed."""
PACKED = "samples"
"""The extra that holds all other fields."""
_NO_PROMPT = 0
"""The token that stands for the prompt of a sample that has none, because it failed."""
_MOST_EXACT = 1 << 53
"""float64 holds all whole numbers up to this one exactly."""
_FORMS = "/forms"
"""The name under which the Forms of a sample are packed. No field of a dataclass can have this name."""


def samples_of(rollout: Rollout) -> list[Any]:
    """The samples of a rollout. A rollout that may have several samples is a list, even if it has only one sample."""
    if isinstance(rollout, list):
        return rollout
    return [rollout]


class SampleStore:
    """Converts the groups of one framework.

    `sample_class`: the framework's Sample. `reward_key`: the setting of this name in the framework's arguments. If it
    is set, the reward of a sample is a dict, and this key names the value to train on. `framework`: the name of the
    framework in errors; None: that of the package of `sample_class`.
    """

    def __init__(self, sample_class: type[Any], reward_key: str | None = None, *, framework: str | None = None) -> None:
        self._class = sample_class
        self._framework = framework or sample_class.__module__.split(".")[0]
        self._module = sys.modules[sample_class.__module__]
        """The only module whose enums and dataclasses are packed and unpacked."""
        self._reward_key = reward_key
        # The default of each field, by name; dataclasses.MISSING for a field without one.
        self._defaults = {field.name: field.default for field in dataclasses.fields(sample_class)}

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
        """The rollouts of one prompt as a group. `more`: values that `read` returns together with the rollouts.

        A rollout without a finite reward has the reward 0 in the group. Raises ValueError for a rollout without
        samples, and for a field that cannot be stored, which the error names.
        """
        samples_by_rollout = [samples_of(rollout) for rollout in rollouts]
        if not samples_by_rollout or not all(samples_by_rollout):
            raise ValueError("the group has a rollout without samples: return at least one sample for each rollout")
        counts = [len(members) for members in samples_by_rollout]
        samples = list(itertools.chain.from_iterable(samples_by_rollout))
        rows = [_Row.of(sample) for sample in samples]
        columns, forms_S = _columns(samples, rows)
        rewards = [self._rollout_reward(members) for members in samples_by_rollout]
        packed_samples = []
        for sample, row, forms in zip(samples, rows, forms_S, strict=True):
            fields_in_arrays = row.exact | set(forms)
            packed_fields = self._packed_fields(sample, fields_in_arrays)
            packed_fields[_FORMS] = self._codec().pack(forms)
            packed_samples.append(packed_fields)
        # "samples": for each sample, its packed fields by name. "lists": for each rollout, True if it is a list.
        packed = {
            "samples": packed_samples,
            "lists": [isinstance(rollout, list) for rollout in rollouts],
            "more": self.pack("groups", "prompt group", dict(more or {})),
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
            sequence_counts=counts if max(counts) > 1 else None,
            finish_reasons=tuple(_finish_reason(members[-1]) for members in samples_by_rollout),
            extras={PACKED: np.frombuffer(msgpack.packb(packed), np.uint8)},
        )

    def read(self, group: RolloutGroup) -> tuple[list[Rollout], dict[str, Any]] | None:
        """The rollouts and the `more` that were passed to `group_of`. None: `group_of` did not make this group."""
        try:
            packed = msgpack.unpackb(group.extras[PACKED].tobytes())
            fields_S = []
            for packed_fields in packed["samples"]:
                fields_S.append({name: self._codec().unpack(packed_fields[name]) for name in packed_fields})
            more = self._codec().unpack(packed["more"])
            lists_G = packed["lists"]
            fits_group = (
                len(fields_S) == group.num_sequences
                and len(lists_G) == group.group_size
                and all(_FORMS in fields for fields in fields_S)
            )
        except (KeyError, TypeError, ValueError, AttributeError, msgpack.UnpackException):
            return None  # no extra of this name, or another program has written the extra
        if not fits_group:
            return None
        samples = []
        rows = zip(fields_S, group.prompts(), group.sampled_spans(), strict=True)
        for k, (fields, prompt, span) in enumerate(rows):
            samples.append(self._sample(group, k, fields, prompt, span))
        rollouts: list[Rollout] = []
        first = 0  # the index of the first sample of the next rollout
        counts_G = np.bincount(group.sequence_rollouts).tolist()
        for count, is_list in zip(counts_G, lists_G, strict=True):
            members = samples[first : first + count]
            first += count
            rollouts.append(members if is_list else members[0])
        return rollouts, more

    def _rollout_reward(self, samples: Sequence[Any]) -> float:
        """The mean of the finite rewards of a rollout's samples; 0 if no reward is finite. Usually all samples of a
        rollout have the same reward."""
        rewards = [self.reward(sample) for sample in samples]
        finite = [reward for reward in rewards if abs(reward) <= MAX_VALUE]  # a comparison with NaN is False
        if not finite:
            return 0.0
        return math.fsum(finite) / len(finite)

    # ------------------------------------------------------------------------------------------------ all other fields

    def _packed_fields(self, sample: Any, fields_in_arrays: set[str]) -> dict[str, bytes]:
        """The packed values, by name, of the fields that the arrays of the group do not hold.

        Attributes that a user has added to the sample are packed like fields. A field with its default value is left
        out, unless it is one of _IN_ARRAYS. `fields_in_arrays`: the names of the fields that the arrays hold.
        """
        packed = {}
        for name, value in vars(sample).items():
            if name in fields_in_arrays:
                continue
            # An attribute that a user has added is not in `_defaults`.
            is_default = name in self._defaults and value is self._defaults[name]
            # Without a packed value, `_sample` would set a field of _IN_ARRAYS from the arrays and not to its default.
            if name in _IN_ARRAYS or not is_default:
                packed[name] = self.pack("samples", name, value)
        return packed

    def _sample(self, group: RolloutGroup, k: int, fields: Mapping[str, Any], prompt: Array, span: slice) -> Any:
        """Row `k` of the group as a sample.

        `fields`: the values that were packed for the sample, by name. `prompt`: the token ids of its prompt. `span`:
        the place of its response in the arrays of the group.
        """
        assert group.loss_mask is not None
        values: dict[str, Any] = {
            "tokens": [*prompt.tolist(), *group.completion_ids[span].tolist()],
            "response_length": span.stop - span.start,
            "rollout_log_probs": group.rollout_logprobs[span].tolist(),
            "loss_mask": group.loss_mask[span].astype(int).tolist(),
        }
        for name, form in fields[_FORMS].items():
            if name not in group.extras:
                # A field with offsets has no extra of its own. It is restored below, together with its ragged field.
                continue
            row = row_of(group, name, k)
            if isinstance(row, tuple):  # `name` is a ragged field
                ids, offsets = row
                form_of_ids, form_of_offsets = form
                values[name] = _formed(ids, *form_of_ids)
                values[RAGGED[name]] = _formed(offsets, *form_of_offsets)
            else:
                values[name] = _formed(row, *form)
        # A packed value replaces the value from the arrays, which may be rounded.
        for name, value in fields.items():
            if name != _FORMS:
                values[name] = value
        return _make(self._class, values)

    def pack(self, whose: str, name: str, value: Any) -> bytes:
        """The packed value of a field. Raises ValueError if the value cannot be packed.

        `whose` ("samples" or "groups") and `name` tell the user in the error which value it is.
        """
        try:
            return self._codec().pack(value)
        except (AttributeError, TypeError, ValueError, OverflowError, RuntimeError):
            raise ValueError(
                f"{self._framework}'s {whose} have a {name} that cannot be stored, {_shown(value)}: put numbers, "
                f"texts, arrays, lists and dicts of them into it"
            ) from None

    def _codec(self) -> _SampleCodec:
        """A codec for one value."""
        return _SampleCodec(self._module)


def _shown(value: Any) -> str:
    """The first 200 characters of the value's repr. If the value is nested too deeply for repr, its outer levels."""
    try:
        return f"{value!r:.200}"
    except RecursionError:
        return reprlib.repr(value)


class _SampleCodec(ValueCodec):
    """Also packs the enums and the dataclasses of one module."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self._module = module

    def content_of(self, value: Any) -> list[Any] | None:
        kind = type(value)
        # Other enums and dataclasses are not packed, because `object_of` could not find their class by its name.
        if self._named(kind.__qualname__) is not kind:
            return None
        if isinstance(value, enum.Enum):
            return [kind.__qualname__, value.value]
        if dataclasses.is_dataclass(kind):
            return [kind.__qualname__, vars(value)]
        return None

    def object_of(self, content: list[Any]) -> Any:
        name, values = content
        kind = self._named(name)
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return kind(values)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return _make(kind, values)
        raise ValueError(f"{name!r} is no class of {self._module.__name__}")

    def _named(self, qualname: str) -> Any:
        """The attribute with this qualified name in the module; None: there is no such attribute."""
        attribute: Any = self._module
        for name in qualname.split("."):
            attribute = getattr(attribute, name, None)
        return attribute


def _make(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass `kind`. Values whose names are not fields become further attributes."""
    names = {field.name for field in dataclasses.fields(kind)}
    instance = kind(**{name: value for name, value in values.items() if name in names})
    for name in values.keys() - names:
        setattr(instance, name, values[name])
    return instance


@dataclasses.dataclass
class _Row:
    """The values of one sample for the arrays of the group."""

    prompt: Array
    completion: Array
    logprobs: Array
    mask: Array
    exact: set[str]
    """The fields of the sample that these arrays hold exactly, so that they need not be packed."""

    @classmethod
    def of(cls, sample: Any) -> _Row:
        """The row of a sample. If a field does not fit into its array, the array gets a default, and the field is not
        in `exact`."""
        exact: set[str] = set()
        tokens = _ids(sample.tokens)
        length = sample.response_length
        if tokens is not None and isinstance(length, int) and 0 <= length < tokens.size:
            # The response has fewer tokens than the sample, so the prompt has at least one token.
            exact |= {"tokens", "response_length"}
            prompt = tokens[: tokens.size - length]
            completion = tokens[tokens.size - length :]
        else:
            # The sample failed before it had a response, so it has no token to train on.
            prompt = np.array([_NO_PROMPT], np.int32)
            completion = np.zeros(0, np.int32)

        logprobs = np.full(completion.size, np.nan, np.float32)  # NaN: unknown
        values = _numbers(sample.rollout_log_probs, "f")
        if values is not None and values.shape == logprobs.shape and (values <= MAX_LOGPROB).all():
            with np.errstate(over="ignore"):  # a number beyond float32 becomes -inf, and is refused below
                float32_values = values.astype(np.float32)
            if np.isfinite(float32_values).all():
                logprobs = float32_values
                # A list may hold whole numbers beside floats. The group would give them back as floats.
                has_integers = any(isinstance(value, int) for value in sample.rollout_log_probs)
                is_exact = (float32_values == values).all() and not has_integers
                if is_exact:
                    exact.add("rollout_log_probs")

        mask = np.ones(completion.size, np.bool_)
        loss_mask = _numbers(sample.loss_mask, "iu")
        if loss_mask is not None and loss_mask.shape == mask.shape:
            mask = loss_mask != 0
            has_only_0_and_1 = ((loss_mask == 0) | (loss_mask == 1)).all()
            if has_only_0_and_1 and not sample.remove_sample:  # below, the mask of a removed sample is replaced
                exact.add("loss_mask")
        if sample.remove_sample:
            mask = np.zeros_like(mask)
        return cls(prompt, completion, logprobs, mask, exact)


def _ids(tokens: Any) -> npt.NDArray[np.int32] | None:
    """A list of token ids as an array; None if `tokens` is empty, or not a list of numbers from 0 to 2**31 - 1."""
    array = _numbers(tokens, "iu")
    if array is None or not array.size:
        return None
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        return None
    return array.astype(np.int32)


def _numbers(values: Any, kinds: str) -> Array | None:
    """A list of numbers as an array of one dimension; None if `values` is no list, or if its numbers do not have one
    of the dtype kinds `kinds`. An empty list fits all kinds."""
    if type(values) is not list:
        return None
    if not values:
        return np.zeros(0, np.float64 if kinds == "f" else np.int64)
    array = _array(values)
    if array is None or array.ndim != 1 or array.dtype.kind not in kinds:
        return None
    return array


def _finish_reason(sample: Any) -> str:
    """The finish reason of a sample, in OpenAI's words, as groups have it. If OpenAI has no word for the status of the
    sample, the finish reason is the status itself."""
    status = str(sample.status.value)
    return {"truncated": "length", "completed": "stop", "pending": "stop"}.get(status, status)


# -------------------------------------------------------------------------------- fields with values for each token


Forms = dict[str, Any]
"""For one sample: name of a field -> the arguments with which `_formed` restores the field from its column."""
Column = tuple[str, list[Any]]
"""The axis of a column, and its rows: one for each sample."""


def _columns(samples: Sequence[Any], rows: Sequence[_Row]) -> tuple[dict[str, Column], list[Forms]]:
    """The columns of the fields that have values for each token, by name, and the Forms of each of the S samples.

    If a sample lacks such a field because the sample failed, the sample's row in the column has zeros or, in a ragged
    column, empty sets. If the values of a sample do not fit a column, no column is made for the field.
    """
    columns: dict[str, Column] = {}
    forms_S: list[Forms] = [{} for _ in samples]
    for name in (*WHOLE, *TOKEN):
        column = _dense_column(name, samples, rows, forms_S)
        if column is not None:
            columns[name] = column
    for name in RAGGED:
        column = _ragged_column(name, samples, rows, forms_S)
        if column is not None:
            columns[name] = column
    return columns, forms_S


def _dense_column(name: str, samples: Sequence[Any], rows: Sequence[_Row], forms_S: Sequence[Forms]) -> Column | None:
    """The column of a field with a value or a row for each token.

    None: no sample has the field, or the values of a sample do not fit the column. Adds the form of the field to the
    Forms of each sample that has the field.
    """
    if name in WHOLE:
        axis = "whole"
        sizes = [row.prompt.size + row.completion.size for row in rows]
        # The last token is never fed to the model, so the field may lack a row for it.
        most_missing = 1
    else:
        axis = "token"
        sizes = [row.completion.size for row in rows]
        most_missing = 0
    values = [getattr(sample, name, None) for sample in samples]
    arrays = [_array(value) for value in values]
    present = [array for array in arrays if array is not None]
    if not present:  # no sample has the field
        return None
    for value, array, size in zip(values, arrays, sizes, strict=True):
        if array is None and value is not None:  # the value cannot become an array
            return None
        if array is not None and not size - most_missing <= len(array) <= size:
            return None
    row_shapes = {array.shape[1:] for array in present}
    if len(row_shapes) > 1:
        return None
    dtype = narrowest(present)
    if dtype is None:
        return None
    filled = [np.zeros((size, *present[0].shape[1:]), dtype) for size in sizes]
    for k, array in enumerate(arrays):
        if array is not None:
            filled[k][: len(array)] = array
            forms_S[k][name] = _form(values[k], array)
    return axis, filled


def _ragged_column(name: str, samples: Sequence[Any], rows: Sequence[_Row], forms_S: Sequence[Forms]) -> Column | None:
    """The column of a field with a set of values for each token of the response.

    None: no sample has the field, or the sets of a sample do not fit its response. Adds the forms of the field, and of
    the field with its offsets, to the Forms of each sample that has the field.
    """
    name_of_offsets = RAGGED[name]
    ids_S = [_array(getattr(sample, name, None)) for sample in samples]
    offsets_S = [_array(getattr(sample, name_of_offsets, None)) for sample in samples]
    present = [ids for ids in ids_S if ids is not None]
    if not present or not all(map(_is_ragged, ids_S, offsets_S, rows)):
        return None
    dtype = narrowest(present, least=np.int32)
    if dtype is None:
        return None
    sets: list[tuple[Array, Array]] = []
    for sample, row, forms, ids, offsets in zip(samples, rows, forms_S, ids_S, offsets_S, strict=True):
        if ids is None or offsets is None:  # the sample failed: an empty set for each token
            sets.append((np.zeros(0, dtype), np.zeros(row.completion.size + 1, np.int64)))
            continue
        sets.append((ids.astype(dtype), offsets))
        forms[name] = [_form(getattr(sample, name), ids), _form(getattr(sample, name_of_offsets), offsets)]
        # The form of the offsets is in the entry above. This entry only tells `group_of` not to pack the offsets.
        forms[name_of_offsets] = None
    return RAGGED_AXIS, sets


def _is_ragged(values: Array | None, offsets: Array | None, row: _Row) -> bool:
    """True if values and offsets fit the response, or if the sample has neither values nor offsets."""
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
    """The numbers of a list, an array or a tensor as an array; None if a group cannot hold such an array."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # numpy has no such dtype
            return None
        value = value.numpy()
    if not isinstance(value, list | np.ndarray):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # for example, lists of different lengths
        return None
    if not array.ndim or array.dtype.kind not in "iuf" or not array.dtype.isnative:
        return None
    return array


def narrowest(arrays: Sequence[Array], least: Any = np.uint8) -> np.dtype[Any] | None:
    """The smallest dtype that holds all these numbers exactly, and that is not smaller than `least`.

    None: no dtype holds them all, for example -1 and 2**63, or 0.5 and 2**53 + 1.
    """
    integers = [array for array in arrays if array.dtype.kind in "iu" and array.size]
    low = min((int(array.min()) for array in integers), default=0)
    high = max((int(array.max()) for array in integers), default=0)
    dtype = np.result_type(*arrays)
    has_floats = any(array.dtype.kind == "f" for array in arrays)
    if has_floats:
        if max(-low, high) > _MOST_EXACT:
            return None
        fits_float32 = all((array.astype(np.float32) == array).all() for array in arrays)
        if fits_float32 and dtype == np.float64:
            return np.dtype(np.float32)
        return dtype
    for candidate in (np.uint8, np.int32, np.int64, np.uint64):
        info = np.iinfo(candidate)
        if info.bits >= np.iinfo(least).bits and info.min <= low and high <= info.max:
            return np.dtype(candidate)
    return None


def _form(value: Any, array: Array) -> list[Any]:
    """The arguments `form`, `dtype` and `length` with which `_formed` makes `value` from a row of a column.

    `array`: the numbers of `value`.
    """
    if isinstance(value, list):
        kind = "list"
    elif isinstance(value, np.ndarray):
        kind = "numpy"
    else:
        kind = "torch"
    return [kind, array.dtype.str, len(array)]


def _formed(row: Array, form: str, dtype: str, length: int) -> Any:
    """A row of a column in the form that the field had in the sample: a list, an array or a tensor.

    `form`, `dtype` and `length`: see `_form`.
    """
    array = np.array(row[:length], dtype=_numeric_dtype(dtype))
    if form == "list":
        return array.tolist()
    if form == "torch":
        return torch.from_numpy(array)
    return array


def _numeric_dtype(name: str) -> np.dtype[Any]:
    """The dtype with this name. Raises ValueError if it is not a dtype of numbers."""
    dtype = np.dtype(name)
    if dtype.kind not in "biuf":
        raise ValueError(f"{name!r} is no dtype of numbers")
    return dtype
