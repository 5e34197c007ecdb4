"""RolloutGroup, one prompt with its G completions, and the byte format in which it travels and is stored.

    0        8               16                     H                      64-aligned
    +--------+---------------+----------------------+-----------+----------+--------- ...
    | magic  | header length | msgpack header       | padding   | array 0  | array 1
    +--------+---------------+----------------------+-----------+----------+--------- ...

The header names every array with its dtype, shape and offset from the start, and holds the small fields. Arrays are
little-endian, in C order, each aligned to 64 bytes. Decoding makes views of the buffer and checks everything in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

MAGIC = b"RPLYGRP\x01"  # the last byte is the format version
ALIGNMENT = 64
_PREFIX = len(MAGIC) + 8
_MAX_HEADER = 4 * 2**20
"""The most bytes of a header. A decoded hostile header takes about 60 times as much memory."""
MAX_LOGPROB = 1e-4
"""Largest log-probability in nats. It is above 0 because engines round."""
MAX_VALUE = 1e9
"""Largest |reward| and |advantage|. A gradient is the advantage times thousands of numbers, and the square of its norm
must fit into float32, which ends at 3e38."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""A trainer divides logits by the temperature. Below, the rounding of logits is larger than what they say; above, all
tokens are equally likely."""
_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}

S = TypeVar("S", bound=np.generic)
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclass(eq=False)
class RolloutGroup:
    """One prompt with its G completions: ragged, never padded. T is the number of tokens of all completions together.

    A completion is a sequence of tokens, so there are S = G sequences. The head of a sequence may be context of its
    own, which the policy did not write: tokens that continue the shared prompt (`context_lengths`).

    The constructor converts arrays to the dtypes below and checks them against each other. It raises ValueError that
    names the field, its value and what would be valid. The arrays of a group that came from a server are read-only:
    copy an array before you change it.
    """

    prompt_ids: Int32
    """(P,) prompt tokens."""
    completion_ids: Int32
    """(T,) tokens of all completions, one completion after the other."""
    completion_lengths: Int32
    """(S,) tokens of each completion, its context included; 0 is allowed."""
    rollout_logprobs: Float32
    """(T,) log-probability of each token when it was sampled, in nats; NaN: unknown, or a token of a context."""
    rewards: Float32
    """(G,)"""
    advantages: Float32
    """(G,)"""
    policy_version: int = 0
    """Version of the policy that the generation started from."""
    policy_version_end: int | None = None
    """Version of the policy at the end of the generation, if it differs from `policy_version`."""
    prompt_id: str = ""
    """Name of the prompt. It is the same in every epoch."""
    loss_mask: Bool | None = None
    """(T,) False for tokens the policy did not write, such as the output of a tool."""
    context_lengths: Int32 | None = None
    """(S,) tokens at the head of each completion that are its own context, after the shared `prompt_ids`. No trainer
    trains on them. They have no log-probability, and do not count as unknown. None: no completion has a context."""
    finish_reasons: tuple[str, ...] | None = None
    """(G,) why each completion ended, for example "stop" or "length"."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """How the tokens were drawn: temperature, top_p, top_k, logprobs_mode."""
    extras: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Any other arrays: log-probabilities of a reference model, images, expert routing."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Small facts that msgpack can hold."""
    validate: InitVar[bool] = True
    """Refuse values that no trainer can use. `decode` does not: tools must be able to show what is stored."""

    def __post_init__(self, validate: bool) -> None:
        self.prompt_ids = vector("prompt_ids", self.prompt_ids, np.int32)
        self.completion_ids = vector("completion_ids", self.completion_ids, np.int32)
        self.completion_lengths = vector("completion_lengths", self.completion_lengths, np.int32)
        self.rollout_logprobs = vector("rollout_logprobs", self.rollout_logprobs, np.float32)
        self.rewards = vector("rewards", self.rewards, np.float32)
        self.advantages = vector("advantages", self.advantages, np.float32)
        tokens, group_size = self.completion_ids.size, self.completion_lengths.size
        if group_size == 0:
            raise ValueError("completion_lengths is empty: a group has at least one completion")
        if (self.completion_lengths < 0).any() or int(self.completion_lengths.sum(dtype=np.int64)) != tokens:
            raise ValueError(
                f"completion_lengths {self.completion_lengths.tolist()} must be non-negative and sum to the "
                f"{tokens} tokens of completion_ids"
            )
        _expect_size("rollout_logprobs", self.rollout_logprobs, tokens, "T")
        _expect_size("rewards", self.rewards, group_size, "G")
        _expect_size("advantages", self.advantages, group_size, "G")
        if self.loss_mask is not None:
            self.loss_mask = vector("loss_mask", self.loss_mask, np.bool_)
            _expect_size("loss_mask", self.loss_mask, tokens, "T")
        if self.context_lengths is not None:
            self.context_lengths = vector("context_lengths", self.context_lengths, np.int32)
            _expect_size("context_lengths", self.context_lengths, group_size, "S")
            outside_S = (self.context_lengths < 0) | (self.context_lengths > self.completion_lengths)
            if outside_S.any():
                row = int(outside_S.argmax())
                raise ValueError(
                    f"context_lengths[{row}] is {self.context_lengths[row]}, and must be from 0 to "
                    f"{self.completion_lengths[row]}, the tokens of the sequence: put the context into completion_ids "
                    f"and completion_lengths as well"
                )
        if self.finish_reasons is not None:
            self.finish_reasons = tuple(self.finish_reasons)
            if len(self.finish_reasons) != group_size:
                raise ValueError(f"finish_reasons has {len(self.finish_reasons)} entries, not G = {group_size}")
        for name in ("policy_version", "policy_version_end"):
            value = getattr(self, name)
            if value is None and name == "policy_version_end":
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ValueError(f"{name} must be an integer, not {value!r}")
        for name in ("sampling", "meta"):
            if not isinstance(value := getattr(self, name), dict):
                raise ValueError(f"{name} must be a dict, not {value!r}")
        for name, array in self.extras.items():
            self.extras[name] = np.asarray(array)
            if self.extras[name].dtype.name not in _DTYPES:
                raise ValueError(
                    f"extras[{name!r}] has dtype {self.extras[name].dtype}, not one of {', '.join(_DTYPES)}"
                )

        if validate:
            self._check_values()

    def _check_values(self) -> None:
        if not isinstance(self.prompt_id, str):
            raise ValueError(f"prompt_id must be a string, not {self.prompt_id!r}")
        if not self.prompt_lengths.all():
            raise ValueError("prompt_ids is empty: the first completion token needs a token before it, such as BOS")
        for name, ids in (("prompt_ids", self.prompt_ids), ("completion_ids", self.completion_ids)):
            if (ids < 0).any():
                raise ValueError(f"{name} holds {ids.min()}: token ids are not negative")
        for name, values_G in (("rewards", self.rewards), ("advantages", self.advantages)):
            if not np.isfinite(values_G).all():
                raise ValueError(f"{name} {values_G.tolist()} must be finite")
            if (largest := float(np.abs(values_G).max())) > MAX_VALUE:
                raise ValueError(f"{name} holds {largest:g}: no trainer can use a value beyond ±{MAX_VALUE:g}")
        temperature = self.sampling.get("temperature", 1.0)
        # 0 is greedy decoding: no trainer can use it, and an evaluation can.
        if isinstance(temperature, int | float) and not (
            temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE
        ):
            raise ValueError(
                f"sampling has the temperature {temperature:g}, not one from {MIN_TEMPERATURE:g} to "
                f"{MAX_TEMPERATURE:g} (0: greedy)"
            )
        # A comparison with NaN, an unknown log-probability, is False.
        if (self.rollout_logprobs > MAX_LOGPROB).any():
            raise ValueError(
                f"rollout_logprobs holds {np.nanmax(self.rollout_logprobs):.3g}: a log-probability is not above 0 "
                f"(NaN: unknown)"
            )
        if self.context_lengths is not None:
            known_T = ~self._sampled_mask() & ~np.isnan(self.rollout_logprobs)
            if known_T.any():
                token = int(known_T.argmax())
                raise ValueError(
                    f"rollout_logprobs holds {self.rollout_logprobs[token]:.3g} at token {token}, which "
                    f"context_lengths says is context: write NaN there"
                )

    @property
    def group_size(self) -> int:
        """G, the number of completions."""
        return int(self.completion_lengths.size)

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens of all completions together."""
        return int(self.completion_ids.size)

    @property
    def prompt_lengths(self) -> Int32:
        """(S,) tokens before the first sampled token of each completion: the shared prompt and its own context."""
        return self.prompt_ids.size + self._contexts()

    @property
    def sampled_lengths(self) -> Int32:
        """(S,) tokens of each completion after its context."""
        return self.completion_lengths - self._contexts()

    @property
    def trained_mask(self) -> Bool:
        """(T,) True for tokens to train on: those after the contexts that `loss_mask` does not exclude."""
        mask_T = self._sampled_mask()
        return mask_T if self.loss_mask is None else mask_T & self.loss_mask

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays (the encoded form adds a header and padding)."""
        return sum(array.nbytes for _, array in self._arrays())

    def prompts(self) -> list[Int32]:
        """The tokens before the first sampled token of each of the G completions."""
        return [
            np.concatenate((self.prompt_ids, ids[:context]))
            for ids, context in zip(self.completions(), self._contexts(), strict=True)
        ]

    def sampled_spans(self) -> list[slice]:
        """For each of the G completions, where its tokens after the context stand in the arrays of length T."""
        ends_S = np.cumsum(self.completion_lengths)
        return [slice(int(end - n), int(end)) for end, n in zip(ends_S, self.sampled_lengths, strict=True)]

    def completions(self) -> list[Int32]:
        """The tokens of each of the G completions with its context, as views of `completion_ids`."""
        return _split(self.completion_ids, self.completion_lengths)

    def completion_logprobs(self) -> list[Float32]:
        """The log-probabilities of each of the G completions in nats, as views of `rollout_logprobs`."""
        return _split(self.rollout_logprobs, self.completion_lengths)

    def encode(self) -> bytes:
        """The group in the byte format of this module."""
        return b"".join(self.encode_pieces())

    def encode_pieces(self) -> list[bytes | memoryview]:
        """The encoded group as consecutive buffers: the header, then each array without a copy."""
        arrays, table, offset = [], [], 0
        for name, array in self._arrays():
            array = np.ascontiguousarray(array, dtype=_DTYPES[array.dtype.name]).reshape(array.shape)
            table.append([name, array.dtype.name, list(array.shape), offset])
            arrays.append(array)
            offset += _aligned(array.nbytes)
        fields = {
            "policy_version": int(self.policy_version),
            "policy_version_end": None if self.policy_version_end is None else int(self.policy_version_end),
            "prompt_id": self.prompt_id,
            "finish_reasons": self.finish_reasons,
            "sampling": self.sampling,
            "meta": self.meta,
        }
        try:
            # Offsets count from the first array, so they do not depend on the length of the header.
            header = msgpack.packb({"arrays": table, "fields": fields})
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"sampling and meta must hold only what msgpack can (None, bool, int, float, str, bytes, "
                f"list, dict): {error}"
            ) from error
        if len(header) > _MAX_HEADER:
            raise ValueError(
                f"sampling, meta, finish_reasons and the names of extras take {len(header)} bytes, more than "
                f"{_MAX_HEADER}: put large values into extras, as arrays"
            )
        start = _aligned(_PREFIX + len(header))
        prefix = MAGIC + len(header).to_bytes(8, "little") + header
        pieces: list[bytes | memoryview] = [prefix.ljust(start, b"\0")]
        for array in arrays:
            if array.nbytes:
                pieces.append(array.reshape(-1).view(np.uint8).data)
                if padding := _aligned(array.nbytes) - array.nbytes:
                    pieces.append(bytes(padding))
        return pieces

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> RolloutGroup:
        """The group in `data`. Its arrays are read-only views of `data`.

        Raises ValueError, with the place and the reason, for bytes that `encode` cannot have written.
        """
        view = memoryview(data).toreadonly().cast("B")
        if len(view) < _PREFIX or view[: len(MAGIC) - 1] != MAGIC[:-1]:
            raise ValueError(f"not a rollout group: {len(view)} bytes that begin with {bytes(view[:8])!r}")
        if view[len(MAGIC) - 1] != MAGIC[-1]:
            raise ValueError(f"rollout group of format {view[len(MAGIC) - 1]}; this version reads {MAGIC[-1]}")
        header_length = int.from_bytes(view[len(MAGIC) : _PREFIX], "little")
        if header_length > min(_MAX_HEADER, len(view) - _PREFIX):
            raise ValueError(f"header of {header_length} bytes in a rollout group of {len(view)}")
        try:
            header = msgpack.unpackb(view[_PREFIX : _PREFIX + header_length], strict_map_key=True)
            fields, table = header["fields"], header["arrays"]
            body = view[min(_aligned(_PREFIX + header_length), len(view)) :]
            arrays: dict[str, Any] = {name: _view(body, name, *entry) for name, *entry in table}
            if len(arrays) != len(table):
                raise ValueError("an array is named twice")
            extras = {name[7:]: arrays.pop(name) for name in list(arrays) if name.startswith("extras/")}
            reasons = fields.pop("finish_reasons")
            reasons = None if reasons is None else tuple(reasons)
            return cls(**arrays, **fields, extras=extras, finish_reasons=reasons, validate=False)
        except ValueError as error:
            raise ValueError(f"damaged rollout group: {error}") from error
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise ValueError(f"damaged rollout group: {type(error).__name__}: {error}") from error
        except msgpack.UnpackException as error:
            raise ValueError(f"damaged rollout group: header: {type(error).__name__}: {error}") from error

    def _contexts(self) -> Int32:
        """(S,) `context_lengths`, 0 where it is None."""
        return np.zeros_like(self.completion_lengths) if self.context_lengths is None else self.context_lengths

    def _sampled_mask(self) -> Bool:
        """(T,) False for the tokens of the contexts."""
        mask_T = np.ones(self.num_tokens, np.bool_)
        if self.context_lengths is not None:
            starts_S = np.cumsum(self.completion_lengths) - self.completion_lengths
            for start, length in zip(starts_S, self.context_lengths, strict=True):
                mask_T[start : start + length] = False
        return mask_T

    def _arrays(self) -> Iterable[tuple[str, npt.NDArray[Any]]]:
        yield "prompt_ids", self.prompt_ids
        yield "completion_ids", self.completion_ids
        yield "completion_lengths", self.completion_lengths
        if self.context_lengths is not None:
            yield "context_lengths", self.context_lengths
        yield "rollout_logprobs", self.rollout_logprobs
        if self.loss_mask is not None:
            yield "loss_mask", self.loss_mask
        yield "rewards", self.rewards
        yield "advantages", self.advantages
        for name, array in self.extras.items():
            yield f"extras/{name}", array

    def __eq__(self, other: object) -> bool:
        """Equal in every field, bit for bit. Two unknown log-probabilities (NaN) are therefore equal."""
        if not isinstance(other, RolloutGroup):
            return NotImplemented
        mine, theirs = dict(self._arrays()), dict(other._arrays())
        small = ("policy_version", "policy_version_end", "prompt_id", "finish_reasons", "sampling", "meta")
        return (
            mine.keys() == theirs.keys()
            and all(_same(mine[name], theirs[name]) for name in mine)
            and all(getattr(self, name) == getattr(other, name) for name in small)
        )


def _split(array_T: npt.NDArray[S], lengths_G: Int32) -> list[npt.NDArray[S]]:
    ends_G = np.cumsum(lengths_G)
    return [array_T[end - length : end] for end, length in zip(ends_G, lengths_G, strict=True)]


def _same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def vector(name: str, value: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """`value` as a one-dimensional array. Raises ValueError that names the field, if it does not fit."""
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {array.shape}")
    if array.dtype == dtype:
        return array
    kinds = {"i": "iu", "b": "b", "f": "fiu"}[np.dtype(dtype).kind]
    if array.size and array.dtype.kind not in kinds:
        raise ValueError(f"{name} must hold {np.dtype(dtype).name}, not {array.dtype}")
    if array.size and np.dtype(dtype).kind == "i":
        info = np.iinfo(np.int32)
        if int(array.min()) < info.min or int(array.max()) > info.max:
            raise ValueError(f"{name} has values from {array.min()} to {array.max()}, outside int32")
    return array.astype(dtype)


def _expect_size(name: str, array: npt.NDArray[Any], size: int, axis: str) -> None:
    if array.size != size:
        raise ValueError(f"{name} has {array.size} entries, not {axis} = {size}")


def _view(body: memoryview, name: str, dtype_name: str, shape: list[int], offset: int) -> npt.NDArray[Any]:
    dtype = _DTYPES.get(dtype_name)
    if dtype is None:
        raise ValueError(f"array {name!r} has dtype {dtype_name!r}, not one of {', '.join(_DTYPES)}")
    if not all(type(n) is int and n >= 0 for n in (offset, *shape)) or len(shape) > 32:
        raise ValueError(f"array {name!r} has shape {shape} and offset {offset}")
    size = math.prod(shape) * dtype.itemsize
    if offset % ALIGNMENT or offset + size > len(body):
        raise ValueError(f"array {name!r} lies at {offset} to {offset + size}, outside {len(body)} bytes or unaligned")
    return np.frombuffer(body, dtype=dtype, count=math.prod(shape), offset=offset if size else 0).reshape(shape)
