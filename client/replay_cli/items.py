"""`replay items`, `show` and `delete`: list the items of a table, print one for people, and delete some."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from replay_cli.connection import Key, MaybeKeys, TableName, TagTexts, ask, connect, parse_tags
from replay_cli.options import option, taking
from replay_cli.output import AsJson, Yes, confirm, console, fail, misuse, plain_table, print_json, tell
from replay_protos.state import Document, plain

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from replay_client import ReplayClient, RolloutGroup
    from replay_client.records import ItemInfo, Membership, StoredItem
    from replay_dashboard.turns import TurnSpan

_ITEMS_PER_PAGE = 1000
_KEYS_PER_CALL = 10_000
_HEAD = 64
"""Bytes that are shown of a payload that is not a rollout group."""
_ARRAYS = {"ids", "logprobs", "loss_mask", "token_advantages"}
"""What the document of a group has for each token."""
_FEW = 16
"""Tokens that are shown of a text without a tokenizer."""
_MOST_TURNS = 64
"""Turns of a sequence that are printed for people. JSON has them all."""


class Order(StrEnum):
    AGE = "age"
    PRIORITY = "priority"
    POLICY_VERSION = "policy_version"
    TIMES_SAMPLED = "times_sampled"
    SIZE = "size"


_BOUNDS = (
    option("min_priority", "Only items of at least this priority.", float),
    option("max_priority", "Only items of at most this priority.", float),
    option("min_staleness", "Only items of at least this staleness.", int),
    option("max_staleness", "Only items of at most this staleness.", int),
)


@taking(_BOUNDS)
def items(
    bounds: dict[str, Any],
    context: typer.Context,
    table: TableName,
    order_by: Annotated[Order, typer.Option(help="Sort the items by this, the lowest first.")] = Order.AGE,
    descending: Annotated[bool, typer.Option("--descending", "-d", help="Sort the highest first.")] = False,
    tag: TagTexts = None,
    limit: Annotated[int, typer.Option(min=1, help="Most items on a page.")] = 20,
    page: Annotated[str, typer.Option(help="Show this page; the page before names it.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the items of a table, one page at a time."""
    from replay_dashboard.units import counted

    wanted = {"order_by": order_by.value, "descending": descending, "tags": parse_tags(tag), **bounds}
    with connect(context) as client:
        found = ask(lambda: client.list_items(table, limit=limit, page=page, **wanted))
    if as_json:
        documents = [item_document(item) for item in found.items]
        facts = {"table": table, "matching": found.matching, "next_page": found.next_page or None}
        print_json(facts | {"items": documents})
        return
    out = console()
    if found.items:
        out.print(_items_table(found.items))
    out.print(
        f"{len(found.items)} of {counted(found.matching, 'item')}"
        + (f"; for the next ones add --page {shlex.quote(found.next_page)}" if found.next_page else "")
    )


def _items_table(rows: Sequence[ItemInfo]) -> Table:
    from replay_dashboard.units import byte_size, duration

    columns: dict[str, Callable[[ItemInfo], str]] = {
        "key": lambda item: str(item.key),
        "priority": lambda item: f"{item.priority:.4g}",
        "effective": lambda item: f"{item.effective_priority:.4g}",
        "age": lambda item: duration(item.age),
        "version": lambda item: str(item.policy_version),
        "staleness": lambda item: str(item.staleness),
        "sampled": lambda item: str(item.times_sampled),
        "bytes": lambda item: byte_size(item.nbytes),
    }
    # Most items wait for nothing and have no tags; then there is no column for it.
    if any(item.waits_for for item in rows):
        columns["waits for"] = lambda item: ", ".join(item.waits_for)
    if any(item.tags for item in rows):
        columns["tags"] = lambda item: _tag_words(item.tags)
    return plain_table([*columns], ([cell(item) for cell in columns.values()] for item in rows), left=("tags",))


def delete(
    context: typer.Context,
    table: TableName,
    keys: MaybeKeys = None,
    tag: TagTexts = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete items from one table, by their keys or by their tags. Other tables keep them.

    Status 1 if a key was not there.
    """
    from replay_dashboard.units import counted

    tags = parse_tags(tag)
    if bool(keys) == bool(tags):
        misuse("name the items to delete by their keys, or by --tag NAME=VALUE")
    with connect(context) as client:
        chosen = list(keys or [item.key for item in ask(lambda: list(all_items(client, table, tags)))])
        confirm(f"Delete {counted(len(set(chosen)), 'item')} from {table}?", yes)
        parts = [chosen[start : start + _KEYS_PER_CALL] for start in range(0, len(chosen), _KEYS_PER_CALL)]
        results = [ask(partial(client.delete, table, part)) for part in parts]
    deleted = sum(result.applied for result in results)
    # What has left since a list by tags was made, has left.
    missing = [] if tags else [key for result in results for key in result.missing]
    tell(as_json, {"deleted": deleted, "missing": [str(key) for key in missing]}, f"{deleted} deleted from {table}")
    if missing:
        fail(f"not in {table}: {', '.join(map(str, missing))}")


def all_items(
    client: ReplayClient, table: str, tags: Mapping[str, str], limit: int | None = None
) -> Iterator[ItemInfo]:
    """The items of a table that have these tags, the oldest first, page by page; with `limit` at most so many."""
    left = _ITEMS_PER_PAGE if limit is None else limit
    page = ""
    while left > 0:
        found = client.list_items(table, limit=min(_ITEMS_PER_PAGE, left), descending=True, page=page, tags=tags)
        yield from found.items
        left -= 0 if limit is None else len(found)
        page = found.next_page
        if not page:
            return


def item_document(item: ItemInfo) -> Document:
    """The key is a string, as in every document."""
    labels = {"tags": item.tags, "columns": sorted(item.labels.columns)}
    facts = vars(item) | {"key": str(item.key), "bytes": item.nbytes} | labels
    return {name: fact for name, fact in facts.items() if name not in ("nbytes", "labels")}


def _tag_words(tags: Mapping[str, str | int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in tags.items())


class Decoder(Protocol):
    def decode(self, token_ids: list[int]) -> str: ...


def show(
    context: typer.Context,
    key: Key,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the model or tokenizer, to show prompt and completions as text.")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also print the arrays.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print one item: prompt and completions, rewards, advantages, lengths, log-probabilities, age, and its tables."""
    from replay_dashboard.group import dump, item_facts
    from replay_generator.stored_prompts import document_of

    with connect(context) as client:
        found = ask(lambda: client.get([key]))
    if not found:
        fail(
            f"this server holds no item {key}: it was consumed, evicted, dropped or deleted, or never inserted; "
            f"`replay items TABLE` lists keys"
        )
    item = found[0]
    decoder = None if tokenizer is None else load_tokenizer(tokenizer)
    try:
        group, problem = item.group, ""
    except ValueError as error:
        group, problem = None, str(error)
    stored = None if group is not None else document_of(item.payload)
    if as_json:
        document = item_facts(item) | {"group": None}
        if stored is not None:
            document |= stored
        elif group is None:
            document["problem"] = problem
            document["head"] = bytes(item.payload[:_HEAD]).hex()
        else:
            document["group"] = group_document(group, decoder)
            if not tokens:
                _drop_arrays(document["group"])
        print_json(document)
        return
    out = console()
    for line in _item_lines(item):
        out.print(line, soft_wrap=True)
    if stored is not None:
        out.print(json.dumps(stored, ensure_ascii=False, indent=2, default=str), soft_wrap=True, markup=False)
        return
    if group is None:
        out.print(f"payload: {problem}", soft_wrap=True)
        out.print(*dump(item.payload[:_HEAD]), sep="\n")
        return
    for text in _group_lines(group, decoder, tokens):
        out.print(text, soft_wrap=True)


def load_tokenizer(path: Path) -> Decoder:
    if not path.is_dir():
        fail(f"--tokenizer: there is no folder {path}")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        fail("--tokenizer needs the package transformers: pip install transformers")
    try:
        loaded: Decoder = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        fail(f"--tokenizer: {path}: {str(error).splitlines()[0]}")
    return loaded


def group_document(group: RolloutGroup, decoder: Decoder | None) -> Document:
    """The group with the ids of all texts, and with the texts if there is a decoder. A completion is one sequence."""
    from replay_dashboard.group import completion_facts, extra_facts
    from replay_dashboard.turns import turns_of

    return {
        "prompt_id": group.prompt_id,
        "policy_version": int(group.policy_version),
        "policy_version_end": None if group.policy_version_end is None else int(group.policy_version_end),
        "sampling": plain(group.sampling),
        "meta": plain(group.meta),
        "extras": {name: extra_facts(group, name) for name in group.extras},
        "prompt": _part(group.prompt_ids.tolist(), decoder),
        "completions": [
            _completion(group, facts, span, decoder) | _turns(group, turns, whole, decoder)
            for facts, span, turns, whole in zip(
                completion_facts(group), group.sampled_spans(), turns_of(group), group.sequence_spans(), strict=True
            )
        ],
    }


def _turns(group: RolloutGroup, turns: Sequence[TurnSpan], whole: slice, decoder: Decoder | None) -> Document:
    """The turns of the sequence that stands in `whole`, with their texts. Nothing where it has none."""
    ids = group.completion_ids[whole]
    parts = [turn.document() | _part(ids[turn.start : turn.stop].tolist(), decoder) for turn in turns]
    return {"turns": parts} if parts else {}


def _part(ids: list[int], decoder: Decoder | None) -> Document:
    """A prompt, a context or what the policy wrote."""
    part: Document = {"tokens": len(ids)}
    return part | ({} if decoder is None else {"text": decoder.decode(ids)}) | {"ids": ids}


def _completion(group: RolloutGroup, completion: Document, span: slice, decoder: Decoder | None) -> Document:
    """The facts of a sequence with its tokens, which stand in `span`."""
    if group.context_lengths is not None:
        before = slice(span.start - int(completion["context_tokens"]), span.start)
        completion["context"] = _part(group.completion_ids[before].tolist(), decoder)
    completion |= _part(group.completion_ids[span].tolist(), decoder)
    completion["logprobs"] = group.rollout_logprobs[span].tolist()
    if group.loss_mask is not None:
        completion["loss_mask"] = group.loss_mask[span].tolist()
    if group.token_advantages is not None:
        completion["token_advantages"] = group.token_advantages[span].tolist()
    return completion


def _drop_arrays(group: Document) -> None:
    """Takes what has a value for each token out of the document of a group."""
    contexts = [each["context"] for each in group["completions"] if "context" in each]
    turns = [turn for each in group["completions"] for turn in each.get("turns", ())]
    for part in (group["prompt"], *group["completions"], *contexts, *turns):
        for name in _ARRAYS & part.keys():
            del part[name]


def _effective(held: Membership) -> str:
    return "" if held.effective_priority == held.priority else f", effective {held.effective_priority:.4g}"


def _item_lines(item: StoredItem) -> list[str]:
    from replay_dashboard.units import duration

    tables = ", ".join(
        f"{name} (priority {held.priority:.4g}{_effective(held)}, sampled {held.times_sampled} times)"
        for name, held in item.tables.items()
    )
    tags = [f"tags {_tag_words(item.tags)}"] if item.tags else []
    return [
        f"key {item.key}  {len(item.payload)} bytes  inserted {duration(item.age)} ago",
        f"policy version {item.policy_version}, staleness {item.staleness}",
        *tags,
        f"in {tables}" if tables else "in no table: only a batch that is being sent still holds it",
    ]


def _group_lines(group: RolloutGroup, decoder: Decoder | None, tokens: bool) -> list[Text]:
    from rich.text import Text

    from replay_dashboard.units import byte_size

    document = group_document(group, decoder)
    named = f" {group.prompt_id!r}" if group.prompt_id else ""
    ended = "" if group.policy_version_end is None else f", ended with version {group.policy_version_end}"
    several = group.sequence_counts is not None
    rollouts = f"rollouts in {group.num_sequences} sequences" if several else "completions"
    lines = [Text(f"group of {group.group_size} {rollouts}, {_tokens(group.num_tokens)}{ended}")]
    roles = [turn["role"] for each in document["completions"] for turn in each.get("turns", ())]
    told = {"turns"} if any(role is not None for role in roles) else set()
    for name in ("sampling", "meta"):
        # The roles stand with the texts below.
        if facts := ", ".join(f"{field} {value}" for field, value in document[name].items() if field not in told):
            lines.append(Text(f"{name}: {facts}"))
    for name, facts in document["extras"].items():
        axis = "" if facts["axis"] == "group" else f", axis {facts['axis']}"
        lines.append(
            Text(f"extras.{name}: {facts['dtype']} {tuple(facts['shape'])}, {byte_size(facts['bytes'])}{axis}")
        )
    lines += [
        Text(),
        Text(f"prompt{named}: {_tokens(document['prompt']['tokens'])}", style="bold"),
        _words(document["prompt"]),
    ]
    if tokens:
        lines.append(Text(f"ids {document['prompt']['ids']}"))
    for completion in document["completions"]:
        mean = completion["mean_logprob"]
        place = f"completion {completion['index']}"
        if several:
            place = f"rollout {completion['rollout']}, sequence {completion['part'] + 1} of {completion['parts']}"
        parts = [
            f"{place}: {_tokens(completion['tokens'])}",
            f"reward {completion['reward']:g}",
            f"advantage {completion['advantage']:+.3g}",
            "log-probabilities unknown" if mean is None else f"mean log-prob {mean:.3f}",
        ]
        if mean is not None and completion["unknown_logprobs"]:
            parts.append(f"{completion['unknown_logprobs']} log-probs unknown")
        if completion["masked_tokens"]:
            parts.append(f"{_tokens(completion['masked_tokens'])} masked")
        if completion["finish_reason"] is not None:
            parts.append(f"ended by {completion['finish_reason']}")
        lines += [Text(), Text("  ".join(parts), style="bold")]
        lines += _turn_lines(completion) if "turns" in completion else [_words(completion)]
        if tokens:
            lines += [Text(f"{name} {_array(completion[name])}") for name in completion if name in _ARRAYS]
    return lines


def _turn_lines(completion: Document) -> list[Text]:
    """What each side wrote in a sequence, and whether it is trained on."""
    from rich.text import Text

    lines = []
    for turn in completion["turns"][:_MOST_TURNS]:
        role, trained, count = turn["role"], turn["trained"], turn["tokens"]
        if role is None and turn["stop"] <= completion["context_tokens"]:
            role = "own context"
        said = "trained on" if trained == count else f"{trained} trained on" if trained else "not trained on"
        parts = [*([] if role is None else [role]), _tokens(count), *([said] if count else [])]
        lines += [Text(f"[{', '.join(parts)}]", style="bold" if trained else "dim"), _words(turn)]
    if left := completion["turns"][_MOST_TURNS:]:
        lines.append(Text(f"[and {len(left)} more turns; --json has them all]", style="dim"))
    return lines


def _words(part: Document) -> Text:
    """The text of a prompt or completion or, without a tokenizer, its first tokens."""
    from rich.text import Text

    if "text" in part:
        return Text(part["text"])
    if not (ids := part["ids"]):
        return Text("(empty)", style="dim")
    more = f" and {len(ids) - _FEW} more" if len(ids) > _FEW else ""
    return Text(f"tokens {' '.join(map(str, ids[:_FEW]))}{more}; --tokenizer PATH shows the text", style="dim")


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


def _array(values: list[Any]) -> str:
    return " ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
