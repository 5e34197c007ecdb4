"""Opening: what is stored of a group under construction, so that any generator can go on with it.

    opening | rollout/0 | rollout/5 | ...      the payload of one item: what to do, and the rollouts that are finished

The opening is what the generator that opened the group has inserted. Each finished rollout is a segment of its own
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
from replay_generator.prompts import Prompt, PromptError
from replay_generator.rollouts import Rollout, RolloutSequence, Turn, checked, group_of_rollouts
from replay_generator.stored_prompts import check_places
from replay_generator.supply import PromptItem

OPENING_MAGIC, ROLLOUT_MAGIC = b"RPLYOPN\x01", b"RPLYROL\x01"
"""The last byte is the format version."""
_TOKENS = {"token_ids": np.int32, "sampled_mask": np.bool_, "logprobs": np.float32, "policy_versions": np.int64}
"""What a sequence has of each token."""
ROLLOUT = "rollout/"
"""The beginning of the names of segments; the number of the rollout follows."""


@dataclass(frozen=True)
class Opening:
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
    """The prompt in its table, which the opening has closed; None: it came from an iterable."""
    failures: list[str] = field(default_factory=list)
    """Why a whole group has no more rollouts."""
    began: str = field(default_factory=lambda: datetime.now().isoformat())
    """When it began, at the place of its opener. Whoever finishes it tells its chat template this day."""

    def encode(self) -> bytes:
        """The bytes for `decode`. Raises PromptError for a row that msgpack cannot hold."""
        fields = vars(self) | {"prompt": self.prompt.packed(), "sampling": asdict(self.sampling)}
        ids = np.array(fields.pop("prompt_ids"), np.int32)
        return b"".join(encode_arrays(OPENING_MAGIC, fields, {"prompt_ids": ids}, {}, {}))

    @classmethod
    def decode(cls, payload: Buffer) -> tuple[Opening, dict[int, Rollout]]:
        """The opening, and the rollouts that were finished, by their numbers.

        Raises ValueError for bytes that `encode` and `encode_rollout` cannot have written.
        """
        try:
            view = memoryview(payload).toreadonly().cast("B")
            decoded = decode_arrays(view, check_magic(view, OPENING_MAGIC, "group under construction"))
            segments, fields = dict[str, npt.NDArray[Any]](), decoded.fields
            decode_segments(decoded.rest, segments, {})
            prompt = Prompt.unpacked(fields.pop("prompt"))
            sampling, item = SamplingConfig(**fields.pop("sampling")), fields.pop("item")
            place = None if item is None else PromptItem(*item)
            ids = vector("prompt_ids", decoded.arrays["prompt_ids"], np.int32).tolist()
            opening = cls(prompt=prompt, prompt_ids=ids, sampling=sampling, item=place, **fields)
            opening._check_numbers()
            rollouts = {
                int(name.removeprefix(ROLLOUT)): decode_rollout(values)
                for name, values in segments.items()
                if name.startswith(ROLLOUT)
            }
            if rollouts:
                _check_rollouts(rollouts, opening.group_size)
            return opening, rollouts
        except Exception as error:  # anybody may have written them
            raise ValueError(f"damaged group under construction: {type(error).__name__}: {error}") from error

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


def encode_whole(opening: Opening, rollouts: Mapping[int, Rollout]) -> bytes:
    """A group that only lacks its rewards, for `Opening.decode`. Raises PromptError for what msgpack cannot hold."""
    try:
        columns = {f"{ROLLOUT}{index}": encode_rollout(rollout) for index, rollout in rollouts.items()}
    except ValueError as error:
        raise PromptError(f"prompt {opening.prompt.prompt_id!r}: {error}") from error
    return b"".join([opening.encode(), *encode_columns(columns, dict.fromkeys(columns, "group"))])


def encode_info(info: Mapping[str, Any]) -> bytes:
    """The bytes of the `info` of a rollout. Raises ValueError for one that msgpack cannot hold."""
    plain = dict(info) if isinstance(info, Mapping) else info  # msgpack knows no other mappings
    try:
        packed: bytes = msgpack.packb(plain)
        return packed
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            "Rollout.info is stored until its group is finished, and holds what msgpack cannot (it can None, "
            f"bool, int, float, str, bytes, list and dict): {error}"
        ) from error


def encode_rollout(rollout: Rollout) -> npt.NDArray[np.uint8]:
    """The bytes of one rollout, as a column. Raises ValueError for an `info` that msgpack cannot hold."""
    info = encode_info(rollout.info)
    arrays: dict[str, npt.NDArray[Any]] = {}
    sequences = []
    for index, sequence in enumerate(rollout.sequences):
        arrays |= {f"{index}/{name}": np.array(getattr(sequence, name), dtype) for name, dtype in _TOKENS.items()}
        for place, (_, extras, _) in enumerate(sequence.drawn):
            arrays |= {f"{index}/{place}/{name}": np.asarray(values) for name, values in extras.items()}
        sequences.append(
            {
                "turns": [[turn.role, turn.tokens, turn.text] for turn in sequence.turns],
                "finish_reason": sequence.finish_reason,
                "drawn": [[start, list(extras), dict(axes)] for start, extras, axes in sequence.drawn],
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


def decode_rollout(column: npt.NDArray[Any]) -> Rollout:
    """What `encode_rollout` wrote. Damage raises what `decode_arrays` says."""
    view = np.ascontiguousarray(column).data.cast("B")
    fields, arrays, *_ = decode_arrays(view, check_magic(view, ROLLOUT_MAGIC, "rollout"))
    sequences = []
    for index, told in enumerate(fields["sequences"]):
        sequence = RolloutSequence(())
        for name, dtype in _TOKENS.items():
            setattr(sequence, name, vector(name, arrays[f"{index}/{name}"], dtype).tolist())
        if len({len(getattr(sequence, name)) for name in _TOKENS}) > 1:
            raise ValueError(f"a sequence has other numbers of {', '.join(_TOKENS)}")
        sequence.turns = [Turn(*turn) for turn in told["turns"]]
        sequence.finish_reason = told["finish_reason"]
        for place, (start, names, axes) in enumerate(told["drawn"]):
            extras = {name: arrays[f"{index}/{place}/{name}"] for name in names}
            sequence.drawn.append((start, extras, axes))
        sequences.append(sequence)
    return Rollout(
        sequences,
        fields["reward"],
        fields["finish_reason"],
        msgpack.unpackb(fields["info"], strict_map_key=False),
        fields["metrics"],
    )


def _check_rollouts(rollouts: Mapping[int, Rollout], group_size: int) -> None:
    """Raises an error for rollouts that no group of this size can have, by making a group of them."""
    if not 0 <= min(rollouts) <= max(rollouts) < group_size:
        raise ValueError(f"it has the rollouts {sorted(rollouts)}, and is a group of {group_size}")
    rewards = []
    for rollout in map(checked, rollouts.values()):
        texts = [text for turn in rollout.turns for text in (turn.role, turn.text)]
        texts += [rollout.finish_reason, rollout.sequences[-1].finish_reason]
        numbers = [0.0 if rollout.reward is None else rollout.reward, *rollout.metrics.values()]
        if [{*map(type, each)} for each in (texts, numbers, [rollout.info])] != [{str}, {float}, {dict}]:
            raise ValueError("the turns, the reasons, the numbers or the info of a rollout are of another type")
        rewards.append(numbers[0])
    group_of_rollouts([*rollouts.values()], 0, rewards=rewards, advantages=rewards)


def lowest_version(rollouts: Mapping[int, Rollout]) -> int | None:
    """The oldest policy version that drew one of their tokens; None: none was drawn."""
    drawn = (
        version
        for rollout in rollouts.values()
        for sequence in rollout.sequences
        for version, sampled in zip(sequence.policy_versions, sequence.sampled_mask, strict=True)
        if sampled
    )
    return min(drawn, default=None)


def sampled_tokens(rollouts: Mapping[int, Rollout]) -> int:
    """How many tokens the policy wrote in them."""
    return sum(sum(sequence.sampled_mask) for rollout in rollouts.values() for sequence in rollout.sequences)
