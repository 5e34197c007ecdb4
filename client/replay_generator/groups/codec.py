"""PartialGroupSpec: the stored form of a partial group, from which any generator can continue the group.

    spec | rollout/0 | rollout/5 | ...      the payload of one item: the spec, and the rollouts that are finished

The generator that opens the group inserts the spec. Each finished rollout is appended as a segment of its own
(`client.extend`), named by its number in the group. A generator that draws the item plays the missing rollouts. The
item has all facts that this generator needs to finish the group.

A partial group that has all its rollouts, and lacks only its rewards, is written at once (`encode_whole`).

A rollout is stored as the hook returned it, and not as a group of one rollout, because reward functions need its texts,
turns and `info`, and they run only when all rollouts are finished.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from replay_client.columns import Buffer, check_magic, decode_arrays, decode_segments, encode_arrays, encode_columns
from replay_client.rollout import vector
from replay_generator.config import MOST_ROLLOUTS
from replay_generator.engines import SamplingConfig
from replay_generator.errors import PromptError
from replay_generator.prompts.prompt import Prompt
from replay_generator.prompts.queue import PromptItem
from replay_generator.prompts.stored import check_places
from replay_generator.rollouts.played_sequence import TOKENS, PlayedSequence, check_sequences
from replay_generator.rollouts.rollout import PlayedRollout, Rollout, RolloutSequence, Turn, checked
from replay_generator.user_code.results import encode_info

PARTIAL_GROUP_MAGIC = b"RPLYOPN\x01"
"""The first bytes of a stored partial group. The last of them is the format version."""
ROLLOUT_MAGIC = b"RPLYROL\x01"
"""The first bytes of a stored rollout. The last of them is the format version."""
ROLLOUT = "rollout/"
"""The beginning of the name of a segment with a rollout. The number of the rollout in its group follows."""


@dataclass(frozen=True)
class PartialGroupSpec:
    """The facts that a generator needs to continue a group. The generator that opens the group writes them."""

    key: int
    """The key that the finished group will have, whichever generator inserts it."""
    prompt: Prompt
    prompt_ids: list[int]
    number: int
    """The group's number in the order of the opener's prompts. The seeds of its rollouts follow from this number."""
    group_size: int
    """The number of rollouts that the group will have, G."""
    sampling: SamplingConfig
    again: bool = False
    """True if an earlier group of this prompt was given up because it was too old."""
    item: PromptItem | None = None
    """The item of the prompt, which the insert of the spec has closed; None: the prompt came from an iterable."""
    failures: list[str] = field(default_factory=list)
    """The errors of the rollouts that failed, if the group lacks only its rewards. Otherwise empty."""
    began: str = field(default_factory=lambda: datetime.now().isoformat())
    """The local time at which the opener began the group, in ISO format. Every generator that plays its rollouts gives
    the day of this time to the chat template."""

    def encode(self) -> bytes:
        """The bytes for `decode`. Raises PromptError for a row that msgpack cannot hold."""
        fields = dict(vars(self))
        fields["prompt"] = self.prompt.packed()
        fields["sampling"] = asdict(self.sampling)
        prompt_ids = np.array(fields.pop("prompt_ids"), np.int32)
        pieces = encode_arrays(PARTIAL_GROUP_MAGIC, fields, {"prompt_ids": prompt_ids}, extras={}, axes={})
        return b"".join(pieces)

    @classmethod
    def decode(cls, payload: Buffer) -> tuple[PartialGroupSpec, dict[int, PlayedRollout]]:
        """The spec, and the rollouts that were finished, by their numbers.

        Raises ValueError for bytes that `encode` and `encode_rollout` cannot have written.
        """
        try:
            view = memoryview(payload).toreadonly().cast("B")
            header_length = check_magic(view, PARTIAL_GROUP_MAGIC, "partial group")
            decoded = decode_arrays(view, header_length)
            fields = decoded.fields
            segments: dict[str, npt.NDArray[Any]] = {}
            decode_segments(decoded.rest, segments, axes={})  # puts the arrays behind the spec into `segments`, by name
            prompt = Prompt.unpacked(fields.pop("prompt"))
            sampling = SamplingConfig(**fields.pop("sampling"))
            stored_item = fields.pop("item")
            item = None if stored_item is None else PromptItem(*stored_item)
            prompt_ids = vector("prompt_ids", decoded.arrays["prompt_ids"], np.int32).tolist()
            spec = cls(prompt=prompt, prompt_ids=prompt_ids, sampling=sampling, item=item, **fields)
            spec._check_numbers()
            rollouts: dict[int, PlayedRollout] = {}
            for name, values in segments.items():
                if name.startswith(ROLLOUT):
                    index = int(name.removeprefix(ROLLOUT))
                    rollouts[index] = decode_rollout(values)
            if rollouts:
                _check_rollouts(rollouts, spec.group_size)
            return spec, rollouts
        except Exception as error:  # any client may have written these bytes
            raise ValueError(f"damaged partial group: {type(error).__name__}: {error}") from error

    def _check_numbers(self) -> None:
        """Raises an error for numbers, failures or a time that no generator can have written."""
        item = self.item or PromptItem(key=0, priority=0.0, epoch=0, position=0)  # these numbers pass the checks
        # Raises ValueError unless all these numbers are whole and at least 0.
        check_places(self.key, self.number, self.group_size, item.key, item.epoch, item.position)
        if not math.isfinite(item.priority):
            raise ValueError(f"the priority of its prompt must be finite, not {item.priority}")
        if not 1 <= self.group_size <= MOST_ROLLOUTS:
            raise ValueError(f"a group has 1 to {MOST_ROLLOUTS} rollouts, not {self.group_size}")
        for failure in self.failures:
            if type(failure) is not str:
                raise ValueError("a failure must be a text")
        datetime.fromisoformat(self.began)  # raises an error for a text that is no time


def encode_whole(spec: PartialGroupSpec, rollouts: Mapping[int, PlayedRollout]) -> bytes:
    """The bytes of a group that lacks only its rewards, for `PartialGroupSpec.decode`.

    `rollouts`: the finished rollouts, by their numbers. Raises PromptError for values that msgpack cannot hold.
    """
    try:
        columns = {f"{ROLLOUT}{index}": encode_rollout(played) for index, played in rollouts.items()}
    except ValueError as error:
        raise PromptError(f"prompt {spec.prompt.prompt_id!r}: {error}") from error
    axes = dict.fromkeys(columns, "group")  # the bytes of a rollout belong to no row of the group
    return b"".join([spec.encode(), *encode_columns(columns, axes)])


def encode_rollout(played: PlayedRollout) -> npt.NDArray[np.uint8]:
    """The bytes of one rollout, as a column. Raises ValueError for an `info` that msgpack cannot hold.

    The arrays of the first sequence are named "0/token_ids" and so on. Among the completions of that sequence that have
    extras, the extras of the first are named "0/0/NAME".
    """
    rollout = played.rollout
    info = encode_info(rollout.info)
    arrays: dict[str, npt.NDArray[Any]] = {}
    sequences = []
    for index, (sequence, played_sequence) in enumerate(zip(rollout.sequences, played.sequences, strict=True)):
        for name in TOKENS:  # the arrays with one value per token: token_ids, logprobs and so on
            arrays[f"{index}/{name}"] = getattr(played_sequence, name)
        for position, (_, extras, _) in enumerate(played_sequence.drawn):
            for name, values in extras.items():
                arrays[f"{index}/{position}/{name}"] = np.asarray(values)
        sequences.append(
            {
                "turns": [[turn.role, turn.tokens, turn.text] for turn in played_sequence.turns],
                "finish_reason": sequence.finish_reason,
                # Only the names of the extras are here, because their values are in `arrays`.
                "drawn": [[start, list(extras), dict(axes)] for start, extras, axes in played_sequence.drawn],
            }
        )
    reward = None if rollout.reward is None else float(rollout.reward)
    fields = {
        "sequences": sequences,
        "reward": reward,
        "finish_reason": rollout.finish_reason,
        "metrics": {name: float(value) for name, value in rollout.metrics.items()},
        "info": info,
    }
    pieces = encode_arrays(ROLLOUT_MAGIC, fields, arrays, extras={}, axes={})
    return np.frombuffer(b"".join(pieces), np.uint8)


def decode_rollout(column: npt.NDArray[Any]) -> PlayedRollout:
    """The rollout that `encode_rollout` wrote. Damaged bytes may raise any error."""
    view = np.ascontiguousarray(column).data.cast("B")
    header_length = check_magic(view, ROLLOUT_MAGIC, "rollout")
    fields, arrays, *_ = decode_arrays(view, header_length)
    sequences = []
    played_sequences = []
    for index, stored in enumerate(fields["sequences"]):
        # `vector` raises ValueError for an array of another dtype or shape.
        token_arrays = {name: vector(name, arrays[f"{index}/{name}"], dtype) for name, dtype in TOKENS.items()}
        sequence = RolloutSequence(())  # an empty sequence, whose attributes are all set below
        for name, values in token_arrays.items():
            setattr(sequence, name, values.tolist())
        sequence.turns = [Turn(*turn) for turn in stored["turns"]]
        sequence.finish_reason = stored["finish_reason"]
        for position, (start, names, axes) in enumerate(stored["drawn"]):
            extras = {name: arrays[f"{index}/{position}/{name}"] for name in names}
            sequence.drawn.append((start, extras, axes))
        sequences.append(sequence)
        played_sequences.append(
            PlayedSequence(sequence.head, **token_arrays, drawn=sequence.drawn, turns=sequence.turns)
        )
    rollout = Rollout(
        sequences=sequences,
        reward=fields["reward"],
        finish_reason=fields["finish_reason"],
        info=msgpack.unpackb(fields["info"], strict_map_key=False),
        metrics=fields["metrics"],
    )
    return PlayedRollout(rollout, tuple(played_sequences))


def _check_rollouts(rollouts: Mapping[int, PlayedRollout], group_size: int) -> None:
    """Raises an error for rollouts that no group of this size can have. `rollouts`: at least one, by number.

    The checks are those that a rollout of a hook passes (`checked`, `check_sequences`). `_check_types` is added,
    because the bytes may come from a client that is no generator.
    """
    if not 0 <= min(rollouts) <= max(rollouts) < group_size:
        raise ValueError(f"it has the rollouts {sorted(rollouts)}, and is a group of {group_size}")
    for played in rollouts.values():
        rollout = checked(played.rollout)
        _check_types(rollout)
    sequences: list[PlayedSequence] = []
    for played in rollouts.values():
        sequences += played.sequences
    check_sequences(sequences)


def _check_types(rollout: Rollout) -> None:
    """Raises ValueError for finish reasons, turns or an `info` of another type than `encode_rollout` writes."""
    # Of the finish reasons of the sequences, readers read only the last.
    texts = [rollout.finish_reason, rollout.sequences[-1].finish_reason]
    for turn in rollout.turns:
        texts += [turn.role, turn.text]
    for text in texts:
        if type(text) is not str:
            raise ValueError(f"the reasons and the turns of a rollout are texts, not {text!r:.80}")
    if type(rollout.info) is not dict:
        raise ValueError(f"the info of a rollout is a dictionary, not {rollout.info!r:.80}")


def lowest_version(rollouts: Mapping[int, PlayedRollout]) -> int | None:
    """The oldest policy version that drew a token of these rollouts; None: the policy drew none of their tokens."""
    lowest_versions = []
    for played in rollouts.values():
        for sequence in played.sequences:
            drawn_versions = sequence.policy_versions[sequence.sampled_mask]
            if drawn_versions.size:
                lowest_versions.append(int(drawn_versions.min()))
    return min(lowest_versions, default=None)


def sampled_tokens(rollouts: Mapping[int, PlayedRollout]) -> int:
    """The number of tokens in these rollouts that the policy wrote."""
    total = 0
    for played in rollouts.values():
        for sequence in played.sequences:
            total += int(sequence.sampled_mask.sum())
    return total
