"""One group as a document: facts, and windows of its tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client.dashboard.tokens import TokenText
from replay_client.records import StoredItem
from replay_client.rollout import RolloutGroup

FIRST_TOKENS = 16_384
"""Tokens of all completions that come with the group; the page asks for the rest."""
MOST_TOKENS = 16_384
"""Tokens of one window."""
HEAD = 512
"""Bytes shown of a payload that is not a group."""


def item_document(item: StoredItem, text: TokenText) -> dict[str, Any]:
    """The item and its group, each completion with its first tokens; or why it is none, with its first bytes."""
    document: dict[str, Any] = {
        "key": str(item.key),
        "age": item.age,
        "policy_version": item.policy_version,
        "staleness": item.staleness,
        "bytes": len(item.payload),
        "tables": {name: vars(held) for name, held in item.tables.items()},
        "tokenizer": text.source,
        "group": None,
    }
    try:
        group = item.group
    except ValueError as error:
        head = bytes(memoryview(item.payload)[:HEAD])
        rows = [head[at : at + 16] for at in range(0, len(head), 16)]
        dump = [f"{r.hex(' '):48}  {''.join(chr(b) if 32 <= b < 127 else '.' for b in r)}" for r in rows]
        return document | {"problem": str(error)[:500], "head": dump}
    first = max(64, min(1024, FIRST_TOKENS // group.group_size))
    spans = spans_of(group)
    return document | {
        "group": {
            "prompt_id": group.prompt_id,
            "policy_version": int(group.policy_version),
            "policy_version_end": group.policy_version_end and int(group.policy_version_end),
            "sampling": plain(group.sampling),
            "meta": plain(group.meta),
            "extras": [
                {"name": name, "dtype": str(array.dtype), "shape": array.shape, "head": plain(array.reshape(-1)[:8])}
                for name, array in group.extras.items()
            ],
            "masked": group.loss_mask is not None,
            "per_token": list(per_token(group)),
            "prompt": window(group, -1, 0, 2048, text),
            "completions": [
                completion_facts(group, row, *spans[row]) | {"window": window(group, row, 0, first, text)}
                for row in range(group.group_size)
            ],
        }
    }


def completion_facts(group: RolloutGroup, row: int, start: int, stop: int) -> dict[str, Any]:
    logprobs = group.rollout_logprobs[start:stop]
    known = logprobs[~np.isnan(logprobs)]
    return {
        "index": row,
        "tokens": stop - start,
        "reward": float(group.rewards[row]),
        "advantage": float(group.advantages[row]),
        "mean_logprob": float(known.mean(dtype=np.float64)) if known.size else None,
        "unknown_logprobs": int(logprobs.size - known.size),
        "masked_tokens": 0 if group.loss_mask is None else int((~group.loss_mask[start:stop]).sum()),
        "finish_reason": str(group.finish_reasons[row])[:80] if group.finish_reasons else None,
    }


def window(group: RolloutGroup, row: int, start: int, stop: int, text: TokenText) -> dict[str, Any]:
    """Tokens `start` to `stop` of a completion, or of the prompt (row -1), with all that is known of each."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    if row < 0:
        ids = group.prompt_ids.tolist()
    else:
        begin, end = spans_of(group)[row]
        ids = group.completion_ids[begin:end].tolist()
        arrays["logprob"] = group.rollout_logprobs[begin:end]
        if group.loss_mask is not None:
            arrays["mask"] = group.loss_mask[begin:end]
        arrays |= {name: group.extras[name][begin:end] for name in per_token(group)}
    start, stop = max(0, start), min(stop, len(ids), start + MOST_TOKENS)
    return {
        "start": start,
        "total": len(ids),
        "ids": ids[start:stop],
        "text": text.pieces(ids, start, stop),
        "arrays": {name: plain(array[start:stop]) for name, array in arrays.items()},
    }


def per_token(group: RolloutGroup) -> list[str]:
    """The extras that hold one number a token of the completions."""
    shape = (group.num_tokens,)
    return [name for name, array in group.extras.items() if array.shape == shape and array.dtype.kind in "iufb"]


def whole_document(item: StoredItem, text: TokenText) -> dict[str, Any]:
    """The group with all of its tokens, for other programs."""
    group = item.group
    document = item_document(item, text)
    document["group"]["prompt"] = {"ids": group.prompt_ids.tolist(), "text": text.text(group.prompt_ids.tolist())}
    for row, (start, stop) in enumerate(spans_of(group)):
        completion = document["group"]["completions"][row]
        ids = group.completion_ids[start:stop].tolist()
        del completion["window"]
        completion |= {"ids": ids, "text": text.text(ids), "logprobs": plain(group.rollout_logprobs[start:stop])}
        if group.loss_mask is not None:
            completion["loss_mask"] = group.loss_mask[start:stop].tolist()
    return document


def spans_of(group: RolloutGroup) -> list[tuple[int, int]]:
    """Where each completion begins and ends in completion_ids."""
    return list(itertools.pairwise([0, *np.cumsum(group.completion_lengths).tolist()]))


def plain(value: Any) -> Any:
    """What msgpack or numpy can hold, as what JSON can."""
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
