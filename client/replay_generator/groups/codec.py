"""PartialGroupSpec: what is stored of a partial group, so that any generator can go on with it.

    spec | rollout/0 | rollout/5 | ...      the payload of one item: what to do, and the rollouts that are finished

The spec is what the generator that opened the group has inserted. Each finished rollout is a segment of its own
(`client.extend`), named by its number in the group. Who is handed the item has all that is needed: it plays the numbers
that are missing, and makes of all of them the group that one generator alone would have made.

With all its rollouts it is a group that only lacks its rewards (`encode_whole`).

A rollout is stored as the hook returned it, and not as a group of one: reward functions see texts, turns and `info`,
and they run when the last rollout is there.
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

PARTIAL_GROUP_MAGIC, ROLLOUT_MAGIC = b"RPLYOPN\x01", b"RPLYROL\x01"
"""The last byte is the format version."""
ROLLOUT = "rollout/"
"""The beginning of the names of segments; the number of the rollout follows."""


@dataclass(frozen=True)
class PartialGroupSpec:
    """What a generator must know of a group to go on with it. The one that opens it writes it, all others read it."""

    key: int
    """Under which the finished group is inserted, whoever finishes it."""
    prompt: Prompt
    prompt_ids: list[int]
    number: int
    """In the order of the opener's prompts. The seeds of its rollouts come from it."""
    group_size: int
    """Rollouts that it is to have, G."""
    sampling: SamplingConfig
    again: bool = False
    """Whether a group of this prompt was given up before, because it was too old."""
    item: PromptItem | None = None
    """The prompt in its table, which the insert of the spec has closed; None: it came from an iterable."""
    failures: list[str] = field(default_factory=list)
    """Why a whole group has no more rollouts."""
    began: str = field(default_factory=lambda: datetime.now().isoformat())
    """When it began, at the place of its opener. Whoever finishes it tells its chat template this day."""

    def encode(self) -> bytes:
        """The bytes for `decode`. Raises PromptError for a row that msgpack cannot hold."""
        fields = vars(self) | {"prompt": self.prompt.packed(), "sampling": asdict(self.sampling)}
        ids = np.array(fields.pop("prompt_ids"), np.int32)
        return b"".join(encode_arrays(PARTIAL_GROUP_MAGIC, fields, {"prompt_ids": ids}, {}, {}))

    @classmethod
    def decode(cls, payload: Buffer) -> tuple[PartialGroupSpec, dict[int, PlayedRollout]]:
        """The spec, and the rollouts that were finished, by their numbers.

        Raises ValueError for bytes that `encode` and `encode_rollout` cannot have written.
        """
        try:
            view = memoryview(payload).toreadonly().cast("B")
            decoded = decode_arrays(view, check_magic(view, PARTIAL_GROUP_MAGIC, "partial group"))
            segments, fields = dict[str, npt.NDArray[Any]](), decoded.fields
            decode_segments(decoded.rest, segments, {})
            prompt = Prompt.unpacked(fields.pop("prompt"))
            sampling, item = SamplingConfig(**fields.pop("sampling")), fields.pop("item")
            place = None if item is None else PromptItem(*item)
            ids = vector("prompt_ids", decoded.arrays["prompt_ids"], np.int32).tolist()
            spec = cls(prompt=prompt, prompt_ids=ids, sampling=sampling, item=place, **fields)
            spec._check_numbers()
            rollouts = {
                int(name.removeprefix(ROLLOUT)): decode_rollout(values)
                for name, values in segments.items()
                if name.startswith(ROLLOUT)
            }
            if rollouts:
                _check_rollouts(rollouts, spec.group_size)
            return spec, rollouts
        except Exception as error:  # anybody may have written them
            raise ValueError(f"damaged partial group: {type(error).__name__}: {error}") from error

    def _check_numbers(self) -> None:
        place = self.item or PromptItem(0, 0.0, 0, 0)
        check_places(self.key, self.number, self.group_size, place.key, place.epoch, place.position)
        if not math.isfinite(place.priority):
            raise ValueError(f"the priority of its prompt must be finite, not {place.priority}")
        if not 1 <= self.group_size <= MOST_ROLLOUTS:
            raise ValueError(f"a group has 1 to {MOST_ROLLOUTS} rollouts, not {self.group_size}")
        if {*map(type, self.failures)} - {str}:
            raise ValueError("a failure must be a text")
        datetime.fromisoformat(self.began)


def encode_whole(spec: PartialGroupSpec, rollouts: Mapping[int, PlayedRollout]) -> bytes:
    """A group that only lacks its rewards, for `PartialGroupSpec.decode`. Raises PromptError for what msgpack cannot
    hold."""
    try:
        columns = {f"{ROLLOUT}{index}": encode_rollout(played) for index, played in rollouts.items()}
    except ValueError as error:
        raise PromptError(f"prompt {spec.prompt.prompt_id!r}: {error}") from error
    return b"".join([spec.encode(), *encode_columns(columns, dict.fromkeys(columns, "group"))])


def encode_rollout(played: PlayedRollout) -> npt.NDArray[np.uint8]:
    """The bytes of one rollout, as a column. Raises ValueError for an `info` that msgpack cannot hold."""
    rollout = played.rollout
    info = encode_info(rollout.info)
    arrays: dict[str, npt.NDArray[Any]] = {}
    sequences = []
    for index, (sequence, tokens) in enumerate(zip(rollout.sequences, played.sequences, strict=True)):
        arrays |= {f"{index}/{name}": getattr(tokens, name) for name in TOKENS}
        for place, (_, extras, _) in enumerate(tokens.drawn):
            arrays |= {f"{index}/{place}/{name}": np.asarray(values) for name, values in extras.items()}
        sequences.append(
            {
                "turns": [[turn.role, turn.tokens, turn.text] for turn in tokens.turns],
                "finish_reason": sequence.finish_reason,
                "drawn": [[start, list(extras), dict(axes)] for start, extras, axes in tokens.drawn],
            }
        )
    fields = {
        "sequences": sequences,
        "reward": None if rollout.reward is None else float(rollout.reward),
        "finish_reason": rollout.finish_reason,
        "metrics": {name: float(value) for name, value in rollout.metrics.items()},
        "info": info,
    }
    return np.frombuffer(b"".join(encode_arrays(ROLLOUT_MAGIC, fields, arrays, {}, {})), np.uint8)


def decode_rollout(column: npt.NDArray[Any]) -> PlayedRollout:
    """What `encode_rollout` wrote. Damage raises what `decode_arrays` says."""
    view = np.ascontiguousarray(column).data.cast("B")
    fields, arrays, *_ = decode_arrays(view, check_magic(view, ROLLOUT_MAGIC, "rollout"))
    sequences = []
    read = []
    for index, stored in enumerate(fields["sequences"]):
        parts = {name: vector(name, arrays[f"{index}/{name}"], dtype) for name, dtype in TOKENS.items()}
        sequence = RolloutSequence(())
        for name, values in parts.items():
            setattr(sequence, name, values.tolist())
        sequence.turns = [Turn(*turn) for turn in stored["turns"]]
        sequence.finish_reason = stored["finish_reason"]
        for place, (start, names, axes) in enumerate(stored["drawn"]):
            extras = {name: arrays[f"{index}/{place}/{name}"] for name in names}
            sequence.drawn.append((start, extras, axes))
        sequences.append(sequence)
        read.append(PlayedSequence(sequence.head, **parts, drawn=sequence.drawn, turns=sequence.turns))
    rollout = Rollout(
        sequences,
        fields["reward"],
        fields["finish_reason"],
        msgpack.unpackb(fields["info"], strict_map_key=False),
        fields["metrics"],
    )
    return PlayedRollout(rollout, tuple(read))


def _check_rollouts(rollouts: Mapping[int, PlayedRollout], group_size: int) -> None:
    """Raises an error for rollouts that no group of this size can have."""
    if not 0 <= min(rollouts) <= max(rollouts) < group_size:
        raise ValueError(f"it has the rollouts {sorted(rollouts)}, and is a group of {group_size}")
    for played in rollouts.values():
        _check_types(checked(played.rollout))
    check_sequences([sequence for played in rollouts.values() for sequence in played.sequences])


def _check_types(rollout: Rollout) -> None:
    """Raises ValueError for values of another type than `encode_rollout` writes."""
    texts = [rollout.finish_reason, rollout.sequences[-1].finish_reason]
    for turn in rollout.turns:
        texts += [turn.role, turn.text]
    for text in texts:
        if type(text) is not str:
            raise ValueError(f"the reasons and the turns of a rollout are texts, not {text!r:.80}")
    if type(rollout.info) is not dict:
        raise ValueError(f"the info of a rollout is a dictionary, not {rollout.info!r:.80}")


def lowest_version(rollouts: Mapping[int, PlayedRollout]) -> int | None:
    """The oldest policy version that drew one of their tokens; None: none was drawn."""
    lowest = []
    for played in rollouts.values():
        for sequence in played.sequences:
            drawn = sequence.policy_versions[sequence.sampled_mask]
            if drawn.size:
                lowest.append(int(drawn.min()))
    return min(lowest, default=None)


def sampled_tokens(rollouts: Mapping[int, PlayedRollout]) -> int:
    """How many tokens the policy wrote in them."""
    return sum(int(each.sampled_mask.sum()) for played in rollouts.values() for each in played.sequences)
