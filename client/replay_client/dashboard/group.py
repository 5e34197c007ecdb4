"""One group as a document: facts, windows of its tokens, and their text by the tokenizer.json of a model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client.records import StoredItem
from replay_client.rollout import RolloutGroup

FIRST_TOKENS = 16_384
"""Tokens of all completions that come with the group; the page asks for the rest."""
MOST_TOKENS = 16_384
"""Tokens of one window."""
HEAD = 512
"""Bytes of a payload that the page shows if the payload is not a group."""
_WARM_UP = 16
"""Tokens that are decoded before a window. The text of a token can depend on the tokens before it."""


class TokenText:
    """Decodes with one tokenizer. Without one, `source` is empty and the page shows ids."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: a folder with a tokenizer.json, or the file. Raises ValueError if it is neither."""
        self.source = ""
        self._tokenizer: Any = None
        if path is not None:
            self.load(path)

    def load(self, path: Path) -> None:
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(
                f"{path} has no tokenizer.json; AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes one"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises nothing more specific
            raise ValueError(f"{file} is not a tokenizer: {str(error)[:200]}") from error
        self.source = str(path)

    def find(self, weights: str) -> None:
        """Loads the tokenizer of a published weights folder, if it has one and no tokenizer is loaded."""
        if not self.source and weights and (Path(weights) / "tokenizer.json").is_file():
            self.load(Path(weights))

    def text(self, ids: Sequence[int]) -> str:
        """The text of all ids; empty without a tokenizer."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if self.source else ""

    def pieces(self, ids: Sequence[int], start: int, stop: int) -> list[str] | None:
        """The text of each token from `start` to `stop`; None without a tokenizer.

        The pieces joined are the text. A token that ends in the middle of a character has an empty piece, and the next
        token has the whole character.
        """
        if not self.source:
            return None
        from tokenizers.decoders import DecodeStream

        first = max(0, start - _WARM_UP)
        stream, pieces = DecodeStream(skip_special_tokens=False), []
        for token in ids[first:stop]:
            if token < 0 or self._tokenizer.id_to_token(token) is None:
                pieces.append(f"⟨{token}⟩")
            else:
                pieces.append(stream.step(self._tokenizer, token) or "")
        return pieces[start - first :]


def item_facts(item: StoredItem) -> dict[str, Any]:
    """Returns the columns that the server keeps of an item, as JSON."""
    return {
        "key": str(item.key),
        "bytes": len(item.payload),
        "age": item.age,
        "policy_version": item.policy_version,
        "staleness": item.staleness,
        "tables": {name: vars(held) for name, held in item.tables.items()},
    }


def item_document(item: StoredItem, text: TokenText, whole: bool = False) -> dict[str, Any]:
    """The item as JSON, with its group: the first tokens of each completion or, with `whole`, all of them.

    If the payload is not a group, the document has the reason (`problem`) and the first bytes (`head`) instead.
    """
    document = item_facts(item) | {"group": None}
    try:
        group = item.group
    except ValueError as error:
        return document | {"problem": str(error)[:500], "head": dump(item.payload[:HEAD])}
    first = group.num_tokens if whole else max(64, min(1024, FIRST_TOKENS // group.group_size))
    return document | {
        "group": {
            "prompt_id": group.prompt_id,
            "policy_version": group.policy_version,
            "policy_version_end": group.policy_version_end,
            "sampling": group.sampling,
            "meta": group.meta,
            "extras": [
                {"name": name, "dtype": str(array.dtype), "shape": array.shape, "head": array.reshape(-1)[:8].real}
                for name, array in group.extras.items()
            ],
            "masked": _masked(group),
            "per_token": per_token(group),
            "prompt": window(group, -1, 0, group.prompt_ids.size if whole else 2048, text, whole),
            "completions": [
                completion_facts(group, row) | {"window": window(group, row, 0, first, text, whole)}
                for row in range(group.group_size)
            ],
        }
    }


def dump(head: bytes | memoryview) -> list[str]:
    """Lines of 16 bytes: as hexadecimal numbers, and as characters."""
    rows = [bytes(head[at : at + 16]) for at in range(0, len(head), 16)]
    return [f"{row.hex(' '):48} {''.join(chr(b) if 32 <= b < 127 else '.' for b in row)}" for row in rows]


def completion_facts(group: RolloutGroup, row: int) -> dict[str, Any]:
    """The numbers of one completion without its context: reward, advantage, lengths, mean log-probability in nats."""
    span = group.sampled_spans()[row]
    logprobs = group.rollout_logprobs[span]
    known = logprobs[~np.isnan(logprobs)]
    return {
        "index": row,
        "tokens": logprobs.size,
        "context_tokens": group.prompt_lengths[row] - group.prompt_ids.size,
        "reward": group.rewards[row],
        "advantage": group.advantages[row],
        "mean_logprob": known.mean(dtype=np.float64) if known.size else None,
        "unknown_logprobs": logprobs.size - known.size,
        "masked_tokens": 0 if group.loss_mask is None else (~group.loss_mask[span]).sum(),
        "finish_reason": str(group.finish_reasons[row])[:80] if group.finish_reasons else None,
    }


def window(
    group: RolloutGroup, row: int, start: int, stop: int, text: TokenText, whole: bool = False
) -> dict[str, Any]:
    """Tokens `start` to `stop` of a completion with its context, or of the prompt (row -1): ids, text, their arrays.

    Raises ValueError for a row that the group does not have.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    if not -1 <= row < group.group_size:
        raise ValueError(f"completion {row}: this group has {group.group_size}")
    if row < 0:
        ids = group.prompt_ids.tolist()
    else:
        span = _spans(group)[row]
        ids = group.completion_ids[span].tolist()
        arrays["logprob"] = group.rollout_logprobs[span]
        if _masked(group):
            arrays["mask"] = group.trained_mask[span]
        arrays |= {name: group.extras[name][span] for name in per_token(group)}
    start = max(0, start)
    stop = min(stop, len(ids), len(ids) if whole else start + MOST_TOKENS)
    return {
        "total": len(ids),
        "ids": ids[start:stop],
        "text": text.text(ids) if whole else text.pieces(ids, start, stop),
        "arrays": {name: array[start:stop] for name, array in arrays.items()},
    }


def per_token(group: RolloutGroup) -> list[str]:
    """The names of the extras that have one number for each token of the completions."""
    shape = (group.num_tokens,)
    return [name for name, array in group.extras.items() if array.shape == shape and array.dtype.kind in "iufb"]


def _masked(group: RolloutGroup) -> bool:
    """Returns whether a trainer may leave tokens of the group out of the loss: it has a loss mask or contexts."""
    return group.loss_mask is not None or group.context_lengths is not None


def _spans(group: RolloutGroup) -> list[slice]:
    """For each completion, its slice of completion_ids, its context included."""
    return list(itertools.starmap(slice, itertools.pairwise([0, *np.cumsum(group.completion_lengths).tolist()])))
