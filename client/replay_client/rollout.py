"""RolloutGroup: holds one prompt with its G rollouts, checks them, and encodes them to bytes.

A rollout is one attempt of the policy at the prompt. It has one reward, and counts once everywhere. Most rollouts are
one sequence of tokens. A rollout of an agent that starts other agents, or whose context was compacted, is several
sequences:

    prompt_ids | sequence 0 | sequence 1 | sequence 2 | ...          S sequences, T tokens after the prompt
                 rollout 0: 2 sequences  | rollout 1   ...           G rollouts, by sequence_counts

`prompt_ids` has the tokens that all sequences share at their start, once. A sequence may begin with a context of its
own, and may have tokens that the policy did not write, such as the output of tools (`loss_mask`).
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client import columns
from replay_client.columns import OFFSETS, RAGGED
from replay_protos.words import counted

MAGIC = b"RPLYGRP\x01"
"""The first bytes of an encoded group. The last of them is the version of the format."""
MAX_LOGPROB = 1e-4
"""Largest log-probability in nats. The bound is above 0 because the rounding of an engine may give a value above 0."""
MAX_VALUE = 1e9
"""Largest |reward| and |advantage|. A gradient grows in proportion to the advantage and has thousands of entries. The
square of its norm must fit into float32, whose largest number is 3e38."""
MIN_TEMPERATURE = 1e-3
"""Lowest temperature. A trainer divides logits by the temperature. At lower temperatures, the rounding errors of logits
are larger than their differences."""
MAX_TEMPERATURE = 1e3
"""Highest temperature. At higher temperatures, all tokens are about equally likely."""
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

_ARRAYS: dict[str, tuple[type[np.generic], str]] = {
    "prompt_ids": (np.int32, ""),
    "completion_ids": (np.int32, "T"),
    "completion_lengths": (np.int32, "S"),
    "context_lengths": (np.int32, "S"),
    "sequence_counts": (np.int32, "G"),
    "rollout_logprobs": (np.float32, "T"),
    "loss_mask": (np.bool_, "T"),
    "rewards": (np.float32, "G"),
    "advantages": (np.float32, "G"),
    "token_advantages": (np.float32, "T"),
}
"""Name of an array of a group -> its dtype and its axis, in the order of storage. Extras are not included. An array
whose axis is "" may have any size."""
_OPTIONAL = ("context_lengths", "sequence_counts", "loss_mask", "token_advantages")
"""The arrays that may be None."""
_CONVERTIBLE_KINDS = {"i": "iu", "b": "b", "f": "fiu"}
"""Kind of a dtype -> the kinds of dtypes that `vector` converts to it. NumPy's kinds are one letter each: i signed
integer, u unsigned integer, f float, b bool."""


@dataclass(eq=False)
class RolloutGroup:
    """One prompt with its G rollouts: ragged, never padded. T is the number of tokens of all S sequences together.

    Without `sequence_counts` each rollout is one sequence, the completion of the prompt, and S = G.

    The constructor converts arrays to the dtypes below and checks them against each other. It raises a ValueError that
    names the field, its value and what would be valid. The arrays of a group that came from a server are read-only:
    copy an array before you change it.

    Generators write the fields, and trainers read them, unless a field says otherwise.
    """

    prompt_ids: Int32
    """(P,) tokens with which all sequences begin."""
    completion_ids: Int32
    """(T,) tokens of all sequences after the shared prompt, one sequence after the other."""
    completion_lengths: Int32
    """(S,) tokens of each sequence after the shared prompt, its context included; 0 is allowed."""
    rollout_logprobs: Float32
    """(T,) log-probability of each token when it was sampled, in nats; NaN: unknown, or a token of a context.

    A trained token (`trained_mask`) whose log-probability is unknown counts as on-policy. With `sequence_counts`, the
    constructor refuses such a token if other trained tokens of its sequence have a log-probability: then a tool has
    written the token, and `loss_mask` should have False for it."""
    rewards: Float32
    """(G,) the reward of each rollout."""
    advantages: Float32
    """(G,) the advantage of each rollout, in units of rewards or of their standard deviation. The loss uses them for
    all tokens of the rollout, unless the trainer computes advantages from the rewards, or `token_advantages` is set."""
    policy_version: int = 0
    """Version of the policy at the start of the generation. The staleness of the group counts from this version."""
    policy_version_end: int | None = None
    """Version of the policy at the end of the generation. None: the version is `policy_version`."""
    prompt_id: str = ""
    """Name of the prompt. It is the same in every epoch. Empty: the prompt has no name."""
    loss_mask: Bool | None = None
    """(T,) False for tokens that the policy did not write, such as the output of a tool: no trainer trains on them.
    None: the policy wrote all tokens after the contexts."""
    context_lengths: Int32 | None = None
    """(S,) the number of tokens at the head of each sequence, after the shared `prompt_ids`, that are its own context.
    No trainer trains on these tokens. Their log-probability is NaN, which does not count as unknown here. None: no
    sequence has a context."""
    sequence_counts: Int32 | None = None
    """(G,) the number of sequences of each rollout, at least 1. The sequences of a rollout follow each other. Set for
    agents whose rollouts have several sequences: sub-agents, contexts that were compacted. A rollout counts once,
    however many sequences it has. None: each rollout is one sequence, and S = G."""
    token_advantages: Float32 | None = None
    """(T,) the advantage of each token, in the place of `advantages` in the loss. Programs with a critic, or with a
    reward for each turn, set this field. Tokens that are not trained on may have any number within ±MAX_VALUE, such as
    0. None: the loss uses `advantages`."""
    finish_reasons: tuple[str, ...] | None = None
    """(G,) why each rollout ended, for example "stop" or "length". None: unknown."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """The settings with which the generator drew the tokens: temperature, top_p, top_k, min_p, logprobs_mode. The
    trainer reads them. A temperature that is absent was 1."""
    extras: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Any other arrays by name: log-probabilities of a reference model, images, expert routing. Any program may write
    and read them. bfloat16 is the dtype of the package ml_dtypes."""
    axes: dict[str, str] = field(default_factory=dict)
    """The axis of an array of `extras`, by the name of the array. The axis says what the rows of the array belong to.
    The program that writes the array writes its axis, too. A program that cuts the group into rollouts or sequences
    cuts the array by its axis (`extra_of`).

    "token": T rows. "whole": P + T rows, of the shared prompt and of the tokens after it, such as the routing of
    experts. "sequence": S rows. "rollout": G rows. "group": any shape; nobody cuts it. "ragged:token": a set of any
    size for each token, such as the tokens that top-p kept. Then `extras[name]` holds the values of all sets (N, ...).
    `extras[name + "/offsets"]` holds T + 1 integers from 0 to N, and the values of token t are
    values[offsets[t]:offsets[t + 1]]. An array whose name is absent here has the axis "group"."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Small facts that msgpack can hold. Any program may write and read them."""
    validate: InitVar[bool] = True
    """Refuse values that no trainer can use. `decode` accepts such values, because tools must be able to show what is
    stored."""

    def __post_init__(self, validate: bool) -> None:
        """Converts the arrays, and checks all fields. Without `validate`, accepts values that no trainer can use."""
        for name, (dtype, _) in _ARRAYS.items():
            value = getattr(self, name)
            is_left_out = value is None and name in _OPTIONAL
            if not is_left_out:
                setattr(self, name, vector(name, value, dtype))
        self._check_lengths()
        self._check_contexts()
        self._check_texts()
        if self.finish_reasons is not None:
            self.finish_reasons = tuple(self.finish_reasons)
            if len(self.finish_reasons) != self.group_size:
                raise ValueError(f"finish_reasons has {len(self.finish_reasons)} entries, not G = {self.group_size}")
        _check_version("policy_version", self.policy_version)
        if self.policy_version_end is not None:
            _check_version("policy_version_end", self.policy_version_end)
        for name in ("sampling", "extras", "axes", "meta"):
            value = getattr(self, name)
            if not isinstance(value, dict):
                raise ValueError(f"{name} must be a dict, not {value!r}")
        if self.extras or self.axes:
            self.extras = columns.checked_columns(self.extras)
            rows_by_axis = {
                "token": self.num_tokens,
                "whole": self.prompt_ids.size + self.num_tokens,
                "sequence": self.num_sequences,
                "rollout": self.group_size,
            }
            columns.check_axes(self.extras, self.axes, rows_by_axis)
        if validate:
            self._check_values()

    def _check_lengths(self) -> None:
        """Raises ValueError unless each array has the size that its axis demands (`_ARRAYS`).

        Also, `completion_lengths` must sum to T, and `sequence_counts` to S. The sums are int64, because hostile
        lengths could make an int32 sum overflow to the right number.
        """
        tokens = self.num_tokens
        sequences = self.num_sequences
        group_size = self.group_size
        lengths_S = self.completion_lengths
        if sequences == 0:
            raise ValueError("completion_lengths is empty: a group has at least one completion")
        length_sum = int(lengths_S.sum(dtype=np.int64))
        if (lengths_S < 0).any() or length_sum != tokens:
            expected = counted(tokens, "token")
            raise ValueError(f"completion_lengths {lengths_S.tolist()} must be non-negative and sum to the {expected}")
        if self.sequence_counts is None and group_size != sequences:
            remedy = "sequence_counts says which sequences make a rollout"
            raise ValueError(f"rewards has {group_size} entries, not G = {sequences}; {remedy}")
        sizes = {"T": tokens, "S": sequences, "G": group_size}
        for name, (_, axis) in _ARRAYS.items():
            array = getattr(self, name)
            if axis and array is not None and array.size != sizes[axis]:
                raise ValueError(f"{name} has {array.size} entries, not {axis} = {sizes[axis]}")
        counts_G = self.sequence_counts
        if counts_G is None:
            return
        count_sum = int(counts_G.sum(dtype=np.int64))
        if (counts_G < 1).any() or count_sum != sequences:
            expected = counted(sequences, "sequence")
            raise ValueError(f"sequence_counts {counts_G.tolist()} must be > 0 and sum to the {expected}")

    def _check_contexts(self) -> None:
        """Raises ValueError unless each context lies within its sequence."""
        if self.context_lengths is None:
            return
        outside_S = (self.context_lengths < 0) | (self.context_lengths > self.completion_lengths)
        if outside_S.any():
            sequence = int(outside_S.argmax())  # the first wrong one
            raise ValueError(
                f"context_lengths[{sequence}] is {self.context_lengths[sequence]}, and must be from 0 to "
                f"{self.completion_lengths[sequence]}, the tokens of the sequence: put the context into completion_ids "
                f"and completion_lengths as well"
            )

    def _check_texts(self) -> None:
        """Raises ValueError unless `prompt_id` is a string, and `finish_reasons` holds strings or is None."""
        if not isinstance(self.prompt_id, str):
            raise ValueError(f"prompt_id must be a string, not {self.prompt_id!r}")
        reasons = self.finish_reasons
        if reasons is None:
            return
        are_strings = isinstance(reasons, list | tuple) and all(isinstance(reason, str) for reason in reasons)
        if not are_strings:
            raise ValueError(f"finish_reasons must be a string for each rollout, or None, not {reasons!r:.200}")

    def _check_values(self) -> None:
        """Raises ValueError for values that no trainer can use."""
        check_tokens(self.prompt_lengths, self.prompt_ids, self.completion_ids)
        _check_numbers("rewards", self.rewards)
        _check_numbers("advantages", self.advantages)
        self._check_token_advantages()
        self._check_temperature()
        check_logprobs(self.rollout_logprobs)
        if self.context_lengths is not None:
            context_T = ~self._sampled_mask()
            wrong_T = context_T & ~np.isnan(self.rollout_logprobs)
            if wrong_T.any():
                token = int(wrong_T.argmax())  # the first wrong one
                raise ValueError(
                    f"rollout_logprobs holds {self.rollout_logprobs[token]:.3g} at token {token}, which "
                    f"context_lengths says is context: write NaN there"
                )
        if self.sequence_counts is not None:
            self._check_known_logprobs()

    def _check_token_advantages(self) -> None:
        """Raises ValueError unless all token advantages are numbers within ±MAX_VALUE."""
        advantages_T = self.token_advantages
        if advantages_T is None:
            return
        # A comparison with NaN is False, so `wrong_T` is True for NaN too.
        wrong_T = ~(np.abs(advantages_T) <= MAX_VALUE)
        if wrong_T.any():
            token = int(wrong_T.argmax())  # the first wrong one
            raise ValueError(
                f"token_advantages holds {advantages_T[token]:g} at token {token}, not a number within "
                f"±{MAX_VALUE:g}: write 0 for tokens that are not trained on"
            )

    def _check_temperature(self) -> None:
        """Raises ValueError for a temperature at which no trainer can compute log-probabilities."""
        temperature = self.sampling.get("temperature", 1.0)
        if not isinstance(temperature, int | float):  # `sampling` may hold anything that msgpack can
            return
        if temperature == 0:  # greedy decoding: no trainer can use it, but an evaluation can
            return
        if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            valid = f"from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g} (0: greedy)"
            raise ValueError(f"sampling has the temperature {temperature:g}, not one {valid}")

    def _check_known_logprobs(self) -> None:
        """Raises ValueError if some trained tokens of a sequence have a log-probability and others have none.

        The code of an agent puts sequences together from turns of the policy and outputs of tools. An engine knows the
        log-probabilities of all tokens that it sampled. So a tool has written the tokens without a log-probability, and
        training on them would teach the policy to write the output of tools.
        """
        trained_T = self.trained_mask
        unknown_T = trained_T & np.isnan(self.rollout_logprobs)
        if not unknown_T.any():
            return
        for sequence, span in enumerate(self.sequence_spans()):
            unknown = int(unknown_T[span].sum())
            trained = int(trained_T[span].sum())
            if 0 < unknown < trained:  # if all are unknown, the engine has reported none
                token = span.start + int(unknown_T[span].argmax())
                raise ValueError(
                    f"rollout_logprobs is NaN at token {token}, and other trained tokens of sequence {sequence} have a "
                    f"log-probability: write it there or, if the policy did not sample the token, False into loss_mask"
                )

    @property
    def group_size(self) -> int:
        """G, the number of rollouts."""
        return int(self.rewards.size)

    @property
    def num_sequences(self) -> int:
        """S, the number of sequences of all rollouts together."""
        return int(self.completion_lengths.size)

    @property
    def sequence_rollouts(self) -> Int32:
        """(S,) the rollout that each sequence belongs to, from 0 to G - 1."""
        rollouts_G = np.arange(self.group_size, dtype=np.int32)
        if self.sequence_counts is None:
            return rollouts_G
        return np.repeat(rollouts_G, self.sequence_counts)

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens of all sequences together."""
        return int(self.completion_ids.size)

    @property
    def prompt_lengths(self) -> Int32:
        """(S,) the number of tokens before the first sampled token of each sequence: those of the shared prompt, and
        those of the sequence's own context."""
        return self.prompt_ids.size + self._contexts()

    @property
    def sampled_lengths(self) -> Int32:
        """(S,) the number of tokens of each sequence after its context."""
        return self.completion_lengths - self._contexts()

    @property
    def rollout_lengths(self) -> Int32:
        """(G,) the number of tokens of each rollout in all its sequences, without the contexts of these sequences."""
        if self.sequence_counts is None:
            return self.sampled_lengths
        first_sequences_G = np.cumsum(self.sequence_counts) - self.sequence_counts
        # `reduceat` sums the sequences from each rollout's first one up to the first one of the next rollout.
        return np.add.reduceat(self.sampled_lengths, first_sequences_G)

    @property
    def trained_mask(self) -> Bool:
        """(T,) True for tokens to train on: tokens after the contexts that `loss_mask` does not exclude."""
        mask_T = self._sampled_mask()
        if self.loss_mask is None:
            return mask_T
        return mask_T & self.loss_mask

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays. The encoded group is larger, because it has a header and padding too."""
        arrays = [*self._arrays().values(), *self.extras.values()]
        return sum(array.nbytes for array in arrays)

    def prompts(self) -> list[Int32]:
        """The tokens before the first sampled token of each of the S sequences: the shared prompt and the context."""
        prompts: list[Int32] = []
        for ids, context_length in zip(self.completions(), self._contexts(), strict=True):
            context = ids[:context_length]
            prompts.append(np.concatenate((self.prompt_ids, context)))
        return prompts

    def sequence_spans(self) -> list[slice]:
        """The span of each of the S sequences in the arrays of length T, its context included."""
        return _spans(np.cumsum(self.completion_lengths))

    def rollout_spans(self) -> list[slice]:
        """The span of each of the G rollouts, with all its sequences, in the arrays of length T."""
        if self.sequence_counts is None:
            return self.sequence_spans()
        ends_S = np.cumsum(self.completion_lengths)
        last_sequences_G = np.cumsum(self.sequence_counts) - 1
        return _spans(ends_S[last_sequences_G])

    def sampled_spans(self) -> list[slice]:
        """The span of each of the S sequences in the arrays of length T, from the end of its context on."""
        ends_S = np.cumsum(self.completion_lengths)
        starts_S = ends_S - self.sampled_lengths
        return [slice(start, end) for start, end in zip(starts_S.tolist(), ends_S.tolist(), strict=True)]

    def completions(self) -> list[Int32]:
        """The tokens of each of the S sequences with its context, as views of `completion_ids`."""
        return [self.completion_ids[span] for span in self.sequence_spans()]

    def completion_logprobs(self) -> list[Float32]:
        """The log-probabilities of each of the S sequences in nats, as views of `rollout_logprobs`."""
        return [self.rollout_logprobs[span] for span in self.sequence_spans()]

    def extra_of(self, name: str, sequence: int) -> npt.NDArray[Any]:
        """The part of `extras[name]` that belongs to a sequence. `sequence`: its number, from 0 to S - 1.

        The axis of the array decides what this part is. "token": a row for each token of the sequence, its context
        included. "whole": a row for each token of the shared prompt, then a row for each token of the sequence.
        "sequence": the row of the sequence. "rollout": the row of the rollout that has the sequence. "ragged:token":
        the values of all tokens of the sequence; `offsets_of` says which of them belong to each token. "group": the
        whole array.

        The result is a view, except for "whole" and for a row that is one number, which are copies.
        """
        array = self.extras[name]
        axis = self.axes.get(name, "group")
        if axis == "group":
            return array
        if axis == "sequence":
            return np.asarray(array[sequence])
        if axis == "rollout":
            rollout = self.sequence_rollouts[sequence]
            return np.asarray(array[rollout])
        span = self.sequence_spans()[sequence]  # the tokens of the sequence, from 0 to T
        if axis == RAGGED:
            offsets = self.extras[name + OFFSETS]
            return array[int(offsets[span.start]) : int(offsets[span.stop])]
        if axis == "token":
            return array[span]
        # "whole": the array has P rows for the shared prompt, and then T rows for the tokens of all sequences.
        prompt_size = self.prompt_ids.size
        prompt_rows = array[:prompt_size]
        sequence_rows = array[prompt_size + span.start : prompt_size + span.stop]
        return np.concatenate((prompt_rows, sequence_rows))

    def offsets_of(self, name: str, sequence: int) -> npt.NDArray[Any]:
        """(L + 1,) the offsets of each token's values in `extra_of(name, sequence)`, for an array with the axis
        "ragged:token". L is the number of tokens of the sequence."""
        span = self.sequence_spans()[sequence]
        offsets = self.extras[name + OFFSETS][span.start : span.stop + 1]
        return np.asarray(offsets - offsets[0])  # count from the first value of the sequence, not of the group

    def encode(self) -> bytes:
        """The group in the byte format of `replay_client.columns`."""
        return b"".join(self.encode_pieces())

    def encode_pieces(self) -> list[bytes | memoryview]:
        """The encoded group as consecutive buffers: the header, then each array. Contiguous arrays are not copied."""
        self._check_texts()  # the caller may have set texts since the group was made
        return columns.encode_arrays(MAGIC, self._fields(), self._arrays(), self.extras, self.axes)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> RolloutGroup:
        """Decodes the group in `data`, and the columns of the segments that follow the group there.

        The arrays of the result are read-only views of `data`.

        Raises ValueError, with the reason, for bytes that `encode` and `encode_columns` cannot have written, and for
        columns that do not fit the group.
        """
        view = memoryview(data).toreadonly().cast("B")
        header_length = columns.check_magic(view, MAGIC, "rollout group")
        try:
            fields, arrays, extras, axes, rest = columns.decode_arrays(view, header_length)
            columns.decode_segments(rest, extras, axes)
            reasons = fields.pop("finish_reasons", None)
            known = cls.__dataclass_fields__.keys()
            unknown = (fields.keys() | arrays.keys()) - known
            if unknown:
                names = ", ".join(sorted(map(str, unknown)))
                raise ValueError(f"there is no field {names}; there are {', '.join(sorted(known))}")
            return cls(**arrays, **fields, extras=extras, axes=axes, finish_reasons=reasons, validate=False)
        except ValueError as error:
            raise ValueError(f"damaged rollout group: {error}") from error
        except columns.DAMAGE as error:
            raise ValueError(f"damaged rollout group: {type(error).__name__}: {error}") from error

    def _contexts(self) -> Int32:
        """(S,) `context_lengths`; zeros if it is None."""
        if self.context_lengths is None:
            return np.zeros_like(self.completion_lengths)
        return self.context_lengths

    def _sampled_mask(self) -> Bool:
        """(T,) True for all tokens after the contexts, False for the tokens of the contexts."""
        mask_T = np.ones(self.num_tokens, np.bool_)
        if self.context_lengths is not None:
            starts_S = np.cumsum(self.completion_lengths) - self.completion_lengths
            for start, length in zip(starts_S, self.context_lengths, strict=True):
                mask_T[start : start + length] = False
        return mask_T

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that are no extras, by name. Arrays that are None are absent."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name in _ARRAYS:
            array = getattr(self, name)
            if array is not None:
                arrays[name] = array
        return arrays

    def _fields(self) -> dict[str, Any]:
        """The fields that are no arrays, by name."""
        version = int(self.policy_version)
        version_end = None if self.policy_version_end is None else int(self.policy_version_end)
        return {
            "policy_version": version,
            "policy_version_end": version_end,
            "prompt_id": self.prompt_id,
            "finish_reasons": self.finish_reasons,
            "sampling": self.sampling,
            "meta": self.meta,
        }

    def __eq__(self, other: object) -> bool:
        """True if the groups are equal in every field, bit for bit. So NaN equals NaN, which stands for unknown."""
        if not isinstance(other, RolloutGroup):
            return NotImplemented
        if self._fields() != other._fields() or self.axes != other.axes:
            return False
        if _bits(self._arrays()) != _bits(other._arrays()):
            return False
        return _bits(self.extras) == _bits(other.extras)


def _bits(arrays: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """The dtype, shape and bytes of each array, by name."""
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


def _spans(ends: npt.NDArray[np.integer[Any]]) -> list[slice]:
    """Spans with these ends. The first span begins at 0, and each other span where the span before it ends."""
    edges = [0, *ends.tolist()]
    return [slice(start, end) for start, end in pairwise(edges)]


def _check_version(name: str, version: object) -> None:
    """Raises ValueError unless `version` is an integer. A bool, which Python counts as an integer, is refused too.

    `name`: the name of the field, for the error.
    """
    if isinstance(version, bool) or not isinstance(version, int | np.integer):
        raise ValueError(f"{name} must be an integer, not {version!r}")


def _check_numbers(name: str, values_G: Float32) -> None:
    """Raises ValueError for a reward or an advantage that no trainer can use."""
    if not np.isfinite(values_G).all():
        raise ValueError(f"{name} {values_G.tolist()} must be finite")
    largest = float(np.abs(values_G).max())
    if largest > MAX_VALUE:
        raise ValueError(f"{name} holds {largest:g}: no trainer can use a value beyond ±{MAX_VALUE:g}")


def check_tokens(prompt_lengths_S: Int32, prompt_ids: Int32, completion_ids: Int32) -> None:
    """Raises ValueError for a sequence without any token before its first sampled one, and for negative tokens."""
    if not prompt_lengths_S.all():  # a length is 0
        raise ValueError("prompt_ids is empty: the first completion token needs a token before it, such as BOS")
    for name, ids in (("prompt_ids", prompt_ids), ("completion_ids", completion_ids)):
        if (ids < 0).any():
            raise ValueError(f"{name} holds {ids.min()}: token ids are not negative")


def check_logprobs(logprobs_T: Float32) -> None:
    """Raises ValueError for a log-probability that no token can have. NaN (unknown) is allowed."""
    # A comparison with NaN is False, so NaN passes.
    if (logprobs_T > MAX_LOGPROB).any():
        highest = f"{np.nanmax(logprobs_T):.3g}"
        raise ValueError(f"rollout_logprobs holds {highest}: a log-probability is not above 0 (NaN: unknown)")


def vector(name: str, value: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """`value` as a one-dimensional array of this dtype. Raises ValueError that names the field if that is impossible.

    Integers are converted to floats, but floats not to integers.
    """
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {array.shape}")
    if array.dtype == dtype:
        return array
    kinds = _CONVERTIBLE_KINDS[np.dtype(dtype).kind]
    # NumPy makes an empty list a float array, so the dtype of an empty array says nothing.
    if array.size and array.dtype.kind not in kinds:
        raise ValueError(f"{name} must hold {np.dtype(dtype).name}, not {array.dtype}")
    if array.size and np.dtype(dtype).kind == "i":  # int32, because a group has no other integer type
        # `astype` would not refuse numbers outside of int32, but wrap them around.
        limits = np.iinfo(np.int32)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise ValueError(f"{name} has values from {array.min()} to {array.max()}, outside int32")
    return array.astype(dtype)
