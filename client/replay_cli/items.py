"""`replay items`, `show` and `delete`: list the items of a table, print one for people, and delete some."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from replay_cli.connection import Key, MaybeKeys, TableName, TagTexts, ask, connect, parse_tags
from replay_cli.options import option, taking
from replay_cli.output import (
    AsJson,
    Yes,
    confirm,
    console,
    fail,
    misuse,
    need,
    one_line,
    plain_table,
    print_json,
    print_result,
)
from replay_protos.state import Document
from replay_protos.words import counted

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from replay_client import ReplayClient
    from replay_client.records import ItemInfo, Membership, StoredItem
    from replay_dashboard.group import TokenText

_ITEMS_PER_PAGE = 1000
_KEYS_PER_CALL = 10_000
_FEW = 16
"""Tokens that are shown of a text without a tokenizer."""
_MOST_TURNS = 64
"""Turns of a sequence that are printed for people. JSON has them all."""


Order = Literal["age", "priority", "policy_version", "times_sampled", "size"]
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
    order_by: Annotated[Order, typer.Option(help="Sort the items by this, the lowest first.")] = "age",
    descending: Annotated[bool, typer.Option("--descending", "-d", help="Sort the highest first.")] = False,
    tag: TagTexts = None,
    limit: Annotated[int, typer.Option(min=1, help="Most items on a page.")] = 20,
    page: Annotated[str, typer.Option(help="Show this page; the page before names it.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the items of a table, one page at a time.

    Example: replay items replay --order-by priority --descending --limit 50
    """
    from replay_dashboard.units import counted

    wanted = {"order_by": order_by, "descending": descending, "tags": parse_tags(tag), **bounds}
    with connect(context) as client:
        found = ask(lambda: client.list_items(table, limit=limit, page=page, **wanted))
    if as_json:
        facts = {"table": table, "matching": found.matching, "next_page": found.next_page or None}
        print_json(facts | {"items": list(map(info_document, found.items))})
        return
    out = console()
    if found.items:
        out.print(_items_table(found.items))
    out.print(
        f"{len(found.items)} of {counted(found.matching, 'item')}"
        + (f"; for the next ones add --page {one_line(shlex.quote(found.next_page))}" if found.next_page else "")
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
    if any(item.missing_columns for item in rows):
        columns["missing columns"] = lambda item: ", ".join(item.missing_columns)
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

    Example: replay table delete replay --tag environment=math
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
    # An item that was listed by its tags and has left the table meanwhile is not missing to anybody.
    missing = [] if tags else [key for result in results for key in result.missing]
    print_result(
        as_json, {"deleted": deleted, "missing": [str(key) for key in missing]}, f"{deleted} deleted from {table}"
    )
    if missing:
        fail(f"not in {table}: {', '.join(map(str, missing))}")


def all_items(client: ReplayClient, table: str, tags: Mapping[str, str]) -> Iterator[ItemInfo]:
    """The items of a table that have these tags, the oldest first, page by page."""
    page, more = "", True
    while more:
        found = client.list_items(table, limit=_ITEMS_PER_PAGE, descending=True, page=page, tags=tags)
        yield from found.items
        page, more = found.next_page, bool(found.next_page)


def info_document(item: ItemInfo) -> Document:
    """The key is a string, as in every document."""
    labels = {"tags": item.tags, "columns": sorted(item.labels.columns)}
    facts = vars(item) | {"key": str(item.key), "bytes": item.nbytes} | labels
    return {name: fact for name, fact in facts.items() if name not in ("nbytes", "labels")}


def _tag_words(tags: Mapping[str, str | int]) -> str:
    return one_line(", ".join(f"{name}={value}" for name, value in tags.items()))


def show(
    context: typer.Context,
    key: Key,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder with a tokenizer.json, to show prompt and completions as text."),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also print the arrays.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print one item: prompt and completions, rewards, advantages, lengths, log-probabilities, age, and its tables.

    Example: replay show 7316 --tokenizer MODEL
    """
    from replay_dashboard.group import item_document
    from replay_generator.prompts.stored import document_of

    with connect(context) as client:
        found = ask(lambda: client.get([key]))
    if not found:
        fail(
            f"this server holds no item {key}: it was consumed, evicted, dropped or deleted, or never inserted; "
            f"`replay items TABLE` lists keys"
        )
    text = load_tokenizer(tokenizer)
    document, stored = item_document(found[0], text, whole=True), document_of(found[0].payload)
    group = document["group"]
    if as_json:
        if group is not None and not tokens:
            for part in (group["prompt"], *(each["window"] for each in group["completions"])):
                del part["ids"], part["arrays"]
        print_json(document | (stored or {}))
        return
    lines: list[str | Text] = [*_item_lines(found[0])]
    if group is not None:
        lines += _group_lines(group, text, tokens)
    elif stored is not None:
        lines.append(json.dumps(stored, ensure_ascii=False, indent=2, default=str))
    else:
        lines += [f"payload: {document['problem']}", *document["head"]]
    out = console()
    for line in lines:
        out.print(line, soft_wrap=True)


def load_tokenizer(path: Path | None) -> TokenText:
    """The tokenizer of a folder; None: one without text."""
    from replay_dashboard.group import TokenText

    if path is not None:
        need("--tokenizer", "dashboard", "tokenizers")
    return ask(lambda: TokenText(path))


def _effective(held: Membership) -> str:
    return "" if held.effective_priority == held.priority else f", effective {held.effective_priority:.4g}"


def _item_lines(item: StoredItem) -> list[str]:
    from replay_dashboard.units import duration

    tables = ", ".join(
        f"{name} (priority {held.priority:.4g}{_effective(held)}, sampled {counted(held.times_sampled, 'time')})"
        for name, held in item.tables.items()
    )
    tags = [f"tags {_tag_words(item.tags)}"] if item.tags else []
    return [
        f"key {item.key}  {counted(len(item.payload), 'byte')}  inserted {duration(item.age)} ago",
        f"policy version {item.policy_version}, staleness {item.staleness}",
        *tags,
        f"in {tables}" if tables else "in no table: only a batch that is being sent still holds it",
    ]


def _group_lines(group: Document, text: TokenText, tokens: bool) -> list[str | Text]:
    from rich.text import Text

    from replay_dashboard.units import byte_size, counted

    sequences, rewards = group["completions"], group["rewards"]
    several = len(sequences) > len(rewards)
    if several:
        rollouts = f"{counted(len(rewards), 'rollout')} in {counted(len(sequences), 'sequence')}"
    else:
        rollouts = counted(len(rewards), "completion")
    ended = "" if group["policy_version_end"] is None else f", ended with version {group['policy_version_end']}"
    total = counted(sum(each["window"]["total"] for each in sequences), "token")
    lines: list[str | Text] = [f"group of {rollouts}, {total}{ended}"]
    roles = [turn["role"] for each in sequences for turn in each["turns"]]
    shown_below = {"turns"} if any(role is not None for role in roles) else set()
    failures = group["meta"].pop("failures", [])
    for name in ("sampling", "meta"):
        # The roles stand with the texts below.
        facts = [f"{field} {value}" for field, value in group[name].items() if field not in shown_below]
        if facts:
            lines.append(one_line(f"{name}: {', '.join(facts)}"))
    lines += [
        one_line(f"a rollout failed: {failure}") for failure in (failures if isinstance(failures, list) else [failures])
    ]
    for extra in group["extras"]:
        axis = "" if extra["axis"] == "group" else f", axis {extra['axis']}"
        name = one_line(extra["name"])
        lines.append(f"extras.{name}: {extra['dtype']} {tuple(extra['shape'])}, {byte_size(extra['bytes'])}{axis}")
    named, prompt = f" {group['prompt_id']!r}" if group["prompt_id"] else "", group["prompt"]
    lines += [
        "",
        Text(f"prompt{named}: {counted(prompt['total'], 'token')}", style="bold"),
        _words(prompt["ids"], text),
    ]
    lines += _arrays(prompt) if tokens else []
    for each in sequences:
        mean, place = each["mean_logprob"], f"completion {each['index']}"
        if several:
            place = f"rollout {each['rollout']}, sequence {each['part'] + 1} of {each['parts']}"
        parts = [
            f"{place}: {counted(each['tokens'], 'token')}",
            f"reward {each['reward']:g}",
            f"advantage {each['advantage']:+.3g}",
            "log-probabilities unknown" if mean is None else f"mean log-prob {mean:.3f}",
        ]
        if mean is not None and each["unknown_logprobs"]:
            parts.append(f"{counted(each['unknown_logprobs'], 'log-prob')} unknown")
        if each["masked_tokens"]:
            parts.append(f"{counted(each['masked_tokens'], 'token')} masked")
        if each["finish_reason"] is not None:
            parts.append(one_line(f"ended by {each['finish_reason']}"))
        lines += ["", Text("  ".join(parts), style="bold")]
        lines += _turn_lines(each, text) if each["turns"] else [_words(each["window"]["ids"], text)]
        lines += _arrays(each["window"]) if tokens else []
    return lines


def _turn_lines(sequence: Document, text: TokenText) -> list[str | Text]:
    """What each side wrote in a sequence, and whether it is trained on."""
    from rich.text import Text

    from replay_dashboard.units import counted

    lines: list[str | Text] = []
    for turn in sequence["turns"][:_MOST_TURNS]:
        role, trained, ids = turn["role"], turn["trained"], sequence["window"]["ids"][turn["start"] : turn["stop"]]
        if role is None and turn["stop"] <= sequence["context_tokens"]:
            role = "own context"
        remark = "trained on" if trained == len(ids) else f"{trained} trained on" if trained else "not trained on"
        parts = [*([] if role is None else [one_line(role)]), counted(len(ids), "token"), *([remark] if ids else [])]
        lines += [Text(f"[{', '.join(parts)}]", style="bold" if trained else "dim"), _words(ids, text)]
    if left := sequence["turns"][_MOST_TURNS:]:
        lines.append(Text(f"[and {counted(len(left), 'more turn')}; --json has them all]", style="dim"))
    return lines


def _words(ids: Sequence[int], text: TokenText) -> str | Text:
    """The text of these tokens or, without a tokenizer, the first ones."""
    from rich.text import Text

    if text.source:
        return text.text(ids)
    if not ids:
        return Text("(empty)", style="dim")
    more = f" and {len(ids) - _FEW} more" if len(ids) > _FEW else ""
    return Text(f"tokens {' '.join(map(str, ids[:_FEW]))}{more}; --tokenizer PATH shows the text", style="dim")


def _arrays(window: Document) -> list[str]:
    """A line for the ids of a text, and one for each of its arrays."""
    lines = [f"ids {' '.join(map(str, window['ids']))}"]
    for name, array in window["arrays"].items():
        numbers = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in array.tolist())
        lines.append(f"{name} {' '.join(numbers)}")
    return lines
