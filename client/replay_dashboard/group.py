"""One group as a JSON document: its facts, and windows of its tokens. A tokenizer.json gives the text of the tokens.

A window is a range of the tokens of one sequence or of the prompt. It also has this range of each array that has a
number for each token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client.records import StoredItem
from replay_client.rollout import RolloutGroup
from replay_dashboard.turns import turns_of
from replay_generator.prompts.stored import document_of

FIRST_TOKENS = 16_384
"""About how many tokens of all sequences together are sent with the group. The page asks for the other tokens."""
MOST_TOKENS = 16_384
"""Most tokens of one window."""
MOST_TURNS = 4096
"""About how many turns of all sequences together are sent with the group. The page shows the remaining turns of a
sequence as one part."""
ANSWER_TOKENS = 400
"""Tokens at the end of an answer that the overview shows."""
PROMPT_TOKENS = 2048
"""Tokens at the beginning of a prompt that are sent with the group, and that the overview shows."""
HEAD = 512
"""Bytes of a payload that the page shows if the payload is not a group."""
_PROMPT_ROW = -1
"""The row for which `window` shows the prompt in place of a sequence."""
_WARM_UP = 16
"""Tokens before a window that are decoded with it: the text of a token can depend on the tokens before it."""


class TokenText:
    """Decodes tokens with one tokenizer. Without a tokenizer, `source` is empty and the page shows ids."""

    def __init__(self, path: Path | None = None) -> None:
        """`path` is a folder with a tokenizer.json, or the file itself. Raises the ValueError of `load`."""
        self.source = ""
        """The path of the tokenizer; empty: there is no tokenizer."""
        self._tokenizer: Any = None
        if path is not None:
            self.load(path)

    def load(self, path: Path) -> None:
        """Replaces the tokenizer by the one at `path`, a tokenizer.json or its folder.

        Raises ValueError if there is no such file, or if the file is not a tokenizer.
        """
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
        """Loads the tokenizer in the folder of published `weights`, unless a tokenizer is loaded or there is none.

        `weights` is empty if no weights are published.
        """
        if self.source or not weights:
            return
        if (Path(weights) / "tokenizer.json").is_file():
            self.load(Path(weights))

    def text(self, ids: Sequence[int]) -> str:
        """The text of these tokens; empty without a tokenizer."""
        if not self.source:
            return ""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int], start: int, stop: int) -> list[str] | None:
        """The text of each token from `start` to `stop` - 1, as a list of pieces; None without a tokenizer.

        All pieces joined are the text of these tokens. If a token ends in the middle of a character, its piece is
        empty, and the piece of the token that completes the character has the whole character. An id that the tokenizer
        does not have is shown as ⟨id⟩.
        """
        if not self.source:
            return None
        from tokenizers.decoders import DecodeStream

        first = max(0, start - _WARM_UP)
        stream = DecodeStream(skip_special_tokens=False)
        pieces: list[str] = []
        for token in ids[first:stop]:
            if token < 0 or self._tokenizer.id_to_token(token) is None:
                pieces.append(f"⟨{token}⟩")
            else:
                # `step` returns None for a token that ends in the middle of a character.
                pieces.append(stream.step(self._tokenizer, token) or "")
        return pieces[start - first :]


def item_document(item: StoredItem, tokenizer: TokenText, whole: bool = False) -> dict[str, Any]:
    """The item as JSON, with its group. The group has the first tokens of each sequence or, with `whole`, all tokens.

    If the payload is not a group, `group` is None, and the document has the fields of `_no_group` too.
    """
    document = {
        "key": str(item.key),
        "bytes": len(item.payload),
        "age": item.age,
        "policy_version": item.policy_version,
        "staleness": item.staleness,
        "tags": item.tags,
        "columns": sorted(item.labels.columns),
        "tables": {name: vars(membership) for name, membership in item.tables.items()},
        "group": None,
    }
    try:
        group = item.group
    except ValueError as error:
        return document | _no_group(item, error)
    document["group"] = _group_document(group, tokenizer, whole)
    return document


def _no_group(item: StoredItem, error: ValueError) -> dict[str, Any]:
    """The fields that describe a payload that is not a group.

    * `problem`: what the payload is instead, or else `error`.
    * `head`: lines of text. They show the JSON of an item of a table of prompts, or else the first bytes.
    """
    stored = document_of(item.payload)
    if stored is None:  # the payload is no item of a table of prompts either
        return {"problem": str(error)[:500], "head": _dump(item.payload[:HEAD])}
    is_cursor = "cursor" in stored
    lines = json.dumps(stored, ensure_ascii=False, indent=1, default=str).splitlines()
    return {
        "problem": "how far prompts are loaded" if is_cursor else "a prompt, of which a group is to be made",
        "head": [line[:500] for line in lines[:100]],
    }


def _group_document(group: RolloutGroup, tokenizer: TokenText, whole: bool) -> dict[str, Any]:
    """The group as JSON: its facts, and the first tokens and turns of each sequence.

    With `whole`, all tokens and turns of each sequence.
    """
    turns_S = turns_of(group)
    meta = dict(group.meta)
    # `first_tokens` and `most_turns` are bounds for each sequence. `most_turns` None: no bound.
    if whole:
        first_tokens = group.num_tokens
        prompt_tokens = group.prompt_ids.size
        most_turns = None
    else:
        first_tokens = max(64, min(1024, FIRST_TOKENS // group.num_sequences))
        prompt_tokens = PROMPT_TOKENS
        most_turns = max(8, min(256, MOST_TURNS // group.num_sequences))
        if any(turn.role is not None for turns in turns_S for turn in turns):
            # Leave out the turns of `meta`. Each completion below has the same turns, and only `most_turns` of them.
            meta.pop("turns", None)
    completions = []
    for row, (facts, turns) in enumerate(zip(completion_facts(group), turns_S, strict=True)):
        completion = dict(facts)
        completion["turns"] = [turn.document() for turn in turns[:most_turns]]
        completion["turn_count"] = len(turns)
        completion["window"] = window(group, row, 0, first_tokens, tokenizer, whole)
        completions.append(completion)
    return {
        "prompt_id": group.prompt_id,
        "policy_version": group.policy_version,
        "policy_version_end": group.policy_version_end,
        "sampling": group.sampling,
        "meta": meta,
        "rewards": group.rewards,
        "extras": [_extra(group, name) for name in group.extras],
        "masked": _has_untrained_tokens(group),
        "per_token": list(per_token(group)),
        "prompt": window(group, _PROMPT_ROW, 0, prompt_tokens, tokenizer, whole),
        "completions": completions,
    }


def answer_of(item: StoredItem, rollout: int, tokenizer: TokenText) -> dict[str, Any]:
    """One rollout of a group: its prompt, its reward, and the end of its last sequence as text.

    Without a tokenizer, the text is the ids of the tokens, and the name of the prompt (`prompt_id`) stands for its
    text.
    """
    group = item.group
    rows = np.flatnonzero(group.sequence_rollouts == rollout)  # the sequences of the rollout
    row = rows[-1]
    ids = group.completion_ids[group.sampled_spans()[row]].tolist()
    shown_ids = ids[-ANSWER_TOKENS:]
    shown_text = tokenizer.text(shown_ids) or " ".join(map(str, shown_ids))
    if len(shown_ids) < len(ids):
        shown_text = f"… {shown_text}"
    return {
        "key": str(item.key),
        "prompt": tokenizer.text(group.prompt_ids[:PROMPT_TOKENS].tolist()) or group.prompt_id,
        "reward": group.rewards[rollout],
        "tokens": len(ids),
        "text": shown_text,
    }


def _dump(head: bytes | memoryview) -> list[str]:
    """Shows bytes as lines of text. Each line has 16 bytes as hexadecimal numbers, and as characters."""
    lines = []
    for start in range(0, len(head), 16):
        row = bytes(head[start : start + 16])
        characters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{row.hex(' '):48} {characters}")
    return lines


def completion_facts(group: RolloutGroup) -> list[dict[str, Any]]:
    """The facts of each of the S sequences: numbers of tokens, mean log-probability in nats, and the reward, advantage
    and finish reason of its rollout.

    `index` is the index of the sequence in the group. `part` is its index in its rollout, and `parts` is the number of
    sequences of this rollout. The numbers of tokens and the mean leave out the context, whose length is
    `context_tokens`.
    """
    spans_S = group.sampled_spans()
    context_lengths_S = group.prompt_lengths - group.prompt_ids.size  # without the shared prompt
    # Only trained tokens count as unknown. The tokens of a tool are not trained on, so they need no log-probability.
    unknown_T = np.isnan(group.rollout_logprobs) & group.trained_mask
    counts_G = [1] * group.group_size if group.sequence_counts is None else group.sequence_counts.tolist()
    parts_S: list[tuple[int, int, int]] = []  # the values of `rollout`, `part` and `parts`
    for rollout, parts in enumerate(counts_G):
        for part in range(parts):
            parts_S.append((rollout, part, parts))
    sequences = []
    for row, (span, (rollout, part, parts)) in enumerate(zip(spans_S, parts_S, strict=True)):
        logprobs = group.rollout_logprobs[span]
        known_logprobs = logprobs[~np.isnan(logprobs)]
        sequences.append(
            {
                "index": row,
                "rollout": rollout,
                "part": part,
                "parts": parts,
                "tokens": logprobs.size,
                "context_tokens": context_lengths_S[row],
                "reward": group.rewards[rollout],
                "advantage": group.advantages[rollout],
                "mean_logprob": known_logprobs.mean(dtype=np.float64) if known_logprobs.size else None,
                "unknown_logprobs": int(unknown_T[span].sum()),
                "masked_tokens": 0 if group.loss_mask is None else (~group.loss_mask[span]).sum(),
                "finish_reason": str(group.finish_reasons[rollout])[:80] if group.finish_reasons else None,
            }
        )
    return sequences


def _extra(group: RolloutGroup, name: str) -> dict[str, Any]:
    """Describes an extra array: dtype, shape, bytes, axis and first values. Of complex values only the real parts."""
    array = group.extras[name]
    return {
        "name": name,
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "bytes": array.nbytes,
        "axis": group.axes.get(name, "group"),
        "head": _numbers(array.reshape(-1)[:8]).real,
    }


def window(
    group: RolloutGroup, row: int, start: int, stop: int, tokenizer: TokenText, whole: bool = False
) -> dict[str, Any]:
    """The ids, text and arrays of the tokens `start` to `stop` - 1 of a sequence with its context.

    `row` is the index of the sequence; -1: the tokens are those of the prompt. In the result, "text" is a list with the
    text of each token of the window, or None without a tokenizer. With `whole`, "text" is one text, of all tokens of
    the sequence, and the window may have more than MOST_TOKENS tokens. Raises ValueError for a row that the group does
    not have.
    """
    if not _PROMPT_ROW <= row < group.num_sequences:
        raise ValueError(f"completion {row}: this group has {group.num_sequences}")
    prompt_length = group.prompt_ids.size
    arrays: dict[str, npt.NDArray[Any]] = {}
    # An array of the axis "whole" begins with the tokens of the prompt. An array of the axis "token" begins after them.
    if row == _PROMPT_ROW:
        ids = group.prompt_ids.tolist()
        for name, array in per_token(group).items():
            if group.axes.get(name) == "whole":
                arrays[name] = array[:prompt_length]
    else:
        span = group.sequence_spans()[row]
        ids = group.completion_ids[span].tolist()
        arrays["logprob"] = group.rollout_logprobs[span]
        if _has_untrained_tokens(group):
            arrays["mask"] = group.trained_mask[span]
        for name, array in per_token(group).items():
            offset = prompt_length if group.axes.get(name) == "whole" else 0
            arrays[name] = array[offset + span.start : offset + span.stop]
    start = max(0, start)
    stop = min(stop, len(ids))
    if not whole:
        stop = min(stop, start + MOST_TOKENS)
    return {
        "total": len(ids),
        "ids": ids[start:stop],
        "text": tokenizer.text(ids) if whole else tokenizer.pieces(ids, start, stop),
        "arrays": {name: _numbers(array[start:stop]) for name, array in arrays.items()},
    }


def per_token(group: RolloutGroup) -> dict[str, npt.NDArray[Any]]:
    """The arrays with one real number for each token, by name. These are the extra arrays with the axis "token" or
    "whole", and the token advantages.

    Extra arrays with several numbers for each token, or with complex numbers, are left out.
    """
    arrays = {}
    for name, axis in group.axes.items():
        if axis not in ("token", "whole"):
            continue
        array = group.extras[name]
        is_real = array.dtype.kind != "c"
        if array.ndim == 1 and is_real:
            arrays[name] = array
    if group.token_advantages is not None:
        arrays["token_advantages"] = group.token_advantages
    return arrays


def _numbers(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same values, as float32 if they are bfloat16, because `tolist` of bfloat16 does not give Python's numbers."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _has_untrained_tokens(group: RolloutGroup) -> bool:
    """True if the group has a loss mask or contexts, so that a trainer may leave some of its tokens out of the loss."""
    return group.loss_mask is not None or group.context_lengths is not None
