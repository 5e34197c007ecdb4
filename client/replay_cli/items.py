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
_MOST_TOKEN_IDS = 16
"""Without a tokenizer, the output shows at most this many token ids of a text."""
_MOST_TURNS = 64
"""The most turns of a sequence that are printed for people. JSON has all turns."""


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
    wanted = {"order_by": order_by, "descending": descending, "tags": parse_tags(tag), **bounds}
    with connect(context) as client:
        listing = ask(lambda: client.list_items(table, limit=limit, page=page, **wanted))
    if as_json:
        document = {
            "table": table,
            "matching": listing.matching,
            "next_page": listing.next_page or None,
            "items": [info_document(item) for item in listing.items],
        }
        print_json(document)
        return
    out = console()
    if listing.items:
        out.print(_items_table(listing.items))
    line = f"{len(listing.items)} of {counted(listing.matching, 'item')}"
    if listing.next_page:
        line += f"; for the next ones add --page {one_line(shlex.quote(listing.next_page))}"
    out.print(line)


def _items_table(rows: Sequence[ItemInfo]) -> Table:
    """A table with a row for each item."""
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
    # Few items have missing columns or tags. So the table shows these facts only if at least one of the items has them.
    if any(item.missing_columns for item in rows):
        columns["missing columns"] = lambda item: ", ".join(item.missing_columns)
    if any(item.tags for item in rows):
        columns["tags"] = lambda item: _tag_words(item.tags)
    cells = []
    for item in rows:
        cells.append([cell(item) for cell in columns.values()])
    return plain_table([*columns], cells, left=("tags",))


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
    tags = parse_tags(tag)
    if bool(keys) == bool(tags):  # neither is given, or both are
        misuse("name the items to delete by their keys, or by --tag NAME=VALUE")
    with connect(context) as client:
        if keys:
            chosen = list(keys)
        else:
            tagged = ask(lambda: list(all_items(client, table, tags)))
            chosen = [item.key for item in tagged]
        confirm(f"Delete {counted(len(set(chosen)), 'item')} from {table}?", yes)
        results = []
        for start in range(0, len(chosen), _KEYS_PER_CALL):
            keys_of_call = chosen[start : start + _KEYS_PER_CALL]
            results.append(ask(partial(client.delete, table, keys_of_call)))
    deleted = sum(result.applied for result in results)
    missing: list[int] = []
    # An item that was found by its tags may leave the table before it is deleted. This is no error.
    if not tags:
        for result in results:
            missing += result.missing
    document = {"deleted": deleted, "missing": [str(key) for key in missing]}
    print_result(as_json, document, f"{deleted} deleted from {table}")
    # `fail` ends the command with status 1. So it comes after the output that says what was deleted.
    if missing:
        fail(f"not in {table}: {', '.join(map(str, missing))}")


def all_items(client: ReplayClient, table: str, tags: Mapping[str, str]) -> Iterator[ItemInfo]:
    """Yields the items of a table that have these tags, the oldest first. Requests them page by page."""
    page = ""  # the first page
    while True:
        # The server sorts items by age unless told otherwise. So the oldest come first if the order is descending.
        listing = client.list_items(table, limit=_ITEMS_PER_PAGE, descending=True, page=page, tags=tags)
        yield from listing.items
        page = listing.next_page
        if not page:
            return


def info_document(item: ItemInfo) -> Document:
    """The facts about an item as JSON. The key is a string, as in all JSON output."""
    facts = vars(item) | {
        "key": str(item.key),
        "bytes": item.nbytes,
        "tags": item.tags,
        "columns": sorted(item.labels.columns),
    }
    # `nbytes` is in the JSON as `bytes`, and `labels` as `tags` and `columns`.
    del facts["nbytes"]
    del facts["labels"]
    return facts


def _tag_words(tags: Mapping[str, str | int]) -> str:
    """The tags in words: `environment=math, level=3`."""
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
        stored_items = ask(lambda: client.get([key]))
    if not stored_items:
        fail(
            f"this server holds no item {key}: it was consumed, evicted, dropped or deleted, or never inserted; "
            f"`replay items TABLE` lists keys"
        )
    item = stored_items[0]
    text = load_tokenizer(tokenizer)
    document = item_document(item, text, whole=True)
    prompt_document = document_of(item.payload)  # None, unless the item is in a table of prompts
    group = document["group"]  # None: the item is no group
    if as_json:
        if group is not None and not tokens:
            # A window holds the tokens of the prompt or of a sequence. Without --tokens, the JSON has only their text.
            windows = [group["prompt"]]
            windows += [sequence["window"] for sequence in group["completions"]]
            for window in windows:
                del window["ids"]
                del window["arrays"]
        print_json(document | (prompt_document or {}))
        return
    lines: list[str | Text] = [*_item_lines(item)]
    if group is not None:
        lines += _group_lines(group, text, tokens)
    elif prompt_document is not None:
        lines.append(json.dumps(prompt_document, ensure_ascii=False, indent=2, default=str))
    else:  # neither a group nor a prompt: the reason, and the beginning of the bytes
        lines += [f"payload: {document['problem']}", *document["head"]]
    out = console()
    for line in lines:
        out.print(line, soft_wrap=True)


def load_tokenizer(path: Path | None) -> TokenText:
    """Loads the tokenizer in a folder. If `path` is None, the result decodes no text."""
    from replay_dashboard.group import TokenText

    if path is not None:
        need("--tokenizer", "dashboard", "tokenizers")
    return ask(lambda: TokenText(path))


def _membership_words(table: str, membership: Membership) -> str:
    """A table that holds an item, in words: `replay (priority 1, effective 0.5, sampled 2 times)`."""
    words = f"priority {membership.priority:.4g}"
    if membership.effective_priority != membership.priority:
        words += f", effective {membership.effective_priority:.4g}"
    return f"{table} ({words}, sampled {counted(membership.times_sampled, 'time')})"


def _item_lines(item: StoredItem) -> list[str]:
    """The lines about an item that do not depend on its payload."""
    from replay_dashboard.units import duration

    lines = [
        f"key {item.key}  {counted(len(item.payload), 'byte')}  inserted {duration(item.age)} ago",
        f"policy version {item.policy_version}, staleness {item.staleness}",
    ]
    if item.tags:
        lines.append(f"tags {_tag_words(item.tags)}")
    tables = [_membership_words(name, membership) for name, membership in item.tables.items()]
    if tables:
        lines.append(f"in {', '.join(tables)}")
    else:
        lines.append("in no table: only a batch that is being sent still holds it")
    return lines


def _group_lines(group: Document, text: TokenText, tokens: bool) -> list[str | Text]:
    """The lines about a group: its facts, its prompt, and each of its sequences. `tokens`: print their arrays too."""
    from rich.text import Text

    prompt = group["prompt"]
    prompt_name = f" {group['prompt_id']!r}" if group["prompt_id"] else ""
    lines: list[str | Text] = [_group_headline(group), *_group_facts(group), ""]
    lines.append(Text(f"prompt{prompt_name}: {counted(prompt['total'], 'token')}", style="bold"))
    lines.append(_words(prompt["ids"], text))
    if tokens:
        lines += _arrays(prompt)
    several = _has_several_sequences(group)
    for sequence in group["completions"]:
        lines.append("")
        lines.append(Text(_sequence_headline(sequence, several=several), style="bold"))
        if sequence["turns"]:
            lines += _turn_lines(sequence, text)
        else:
            lines.append(_words(sequence["window"]["ids"], text))
        if tokens:
            lines += _arrays(sequence["window"])
    return lines


def _has_several_sequences(group: Document) -> bool:
    """True if a rollout of the group has more than one sequence."""
    return len(group["completions"]) > len(group["rewards"])


def _group_headline(group: Document) -> str:
    """The size of a group: `group of 8 completions, 512 tokens, ended with version 3`."""
    sequences = group["completions"]
    rollouts = len(group["rewards"])
    if _has_several_sequences(group):
        size = f"{counted(rollouts, 'rollout')} in {counted(len(sequences), 'sequence')}"
    else:
        size = counted(rollouts, "completion")
    total = sum(sequence["window"]["total"] for sequence in sequences)
    line = f"group of {size}, {counted(total, 'token')}"
    if group["policy_version_end"] is not None:
        line += f", ended with version {group['policy_version_end']}"
    return line


def _group_facts(group: Document) -> list[str]:
    """The lines about `sampling`, `meta`, failed rollouts and extra arrays. Removes `failures` from `meta`."""
    from replay_dashboard.units import byte_size

    # If the turns have roles, the lines of the turns show them, below the facts. The entry `turns` of `meta` would
    # repeat the roles.
    shown_below = {"turns"} if _has_roles(group) else set()
    failures = group["meta"].pop("failures", [])  # each failure has a line of its own below
    lines = []
    for name in ("sampling", "meta"):
        facts = [f"{field} {value}" for field, value in group[name].items() if field not in shown_below]
        if facts:
            lines.append(one_line(f"{name}: {', '.join(facts)}"))
    if not isinstance(failures, list):
        failures = [failures]
    for failure in failures:
        lines.append(one_line(f"a rollout failed: {failure}"))
    for extra in group["extras"]:
        axis = "" if extra["axis"] == "group" else f", axis {extra['axis']}"
        name = one_line(extra["name"])
        lines.append(f"extras.{name}: {extra['dtype']} {tuple(extra['shape'])}, {byte_size(extra['bytes'])}{axis}")
    return lines


def _has_roles(group: Document) -> bool:
    """True if a turn of the group has a role."""
    roles = []
    for sequence in group["completions"]:
        roles += [turn["role"] for turn in sequence["turns"]]
    return any(role is not None for role in roles)


def _sequence_headline(sequence: Document, *, several: bool) -> str:
    """The facts of one sequence. `several`: True if a rollout of its group has several sequences."""
    if several:
        name = f"rollout {sequence['rollout']}, sequence {sequence['part'] + 1} of {sequence['parts']}"
    else:
        name = f"completion {sequence['index']}"
    facts = [
        f"{name}: {counted(sequence['tokens'], 'token')}",
        f"reward {sequence['reward']:g}",
        f"advantage {sequence['advantage']:+.3g}",
    ]
    mean = sequence["mean_logprob"]
    if mean is None:
        facts.append("log-probabilities unknown")
    else:
        facts.append(f"mean log-prob {mean:.3f}")
        if sequence["unknown_logprobs"]:
            facts.append(f"{counted(sequence['unknown_logprobs'], 'log-prob')} unknown")
    if sequence["masked_tokens"]:
        facts.append(f"{counted(sequence['masked_tokens'], 'token')} masked")
    if sequence["finish_reason"] is not None:
        facts.append(one_line(f"ended by {sequence['finish_reason']}"))
    return "  ".join(facts)


def _turn_lines(sequence: Document, text: TokenText) -> list[str | Text]:
    """The text of each turn of a sequence, with its role, its length, and how much of it is trained on.

    In `sequence`, positions count from the end of the group's prompt: position 0 is the first token after this prompt.
    `window` holds the tokens of the sequence from position 0 on. Of these, the first `context_tokens` tokens are the
    sequence's own context, which no other sequence shares.
    """
    from rich.text import Text

    lines: list[str | Text] = []
    for turn in sequence["turns"][:_MOST_TURNS]:
        ids = sequence["window"]["ids"][turn["start"] : turn["stop"]]
        role = turn["role"]
        is_own_context = turn["stop"] <= sequence["context_tokens"]
        if role is None and is_own_context:
            role = "own context"
        facts = []
        if role is not None:
            facts.append(one_line(role))
        facts.append(counted(len(ids), "token"))
        if ids:
            facts.append(_trained_words(turn["trained"], len(ids)))
        style = "bold" if turn["trained"] else "dim"
        lines.append(Text(f"[{', '.join(facts)}]", style=style))
        lines.append(_words(ids, text))
    hidden = len(sequence["turns"]) - _MOST_TURNS
    if hidden > 0:
        lines.append(Text(f"[and {counted(hidden, 'more turn')}; --json has them all]", style="dim"))
    return lines


def _trained_words(trained: int, tokens: int) -> str:
    """The part of the tokens of a turn that is trained on, in words."""
    if trained == tokens:
        return "trained on"
    if trained:
        return f"{trained} trained on"
    return "not trained on"


def _words(ids: Sequence[int], text: TokenText) -> str | Text:
    """The text of these tokens or, without a tokenizer, the first token ids."""
    from rich.text import Text

    if text.source:
        return text.text(ids)
    if not ids:
        return Text("(empty)", style="dim")
    shown_ids = " ".join(map(str, ids[:_MOST_TOKEN_IDS]))
    hidden = len(ids) - _MOST_TOKEN_IDS
    more = f" and {hidden} more" if hidden > 0 else ""
    return Text(f"tokens {shown_ids}{more}; --tokenizer FOLDER shows the text", style="dim")


def _arrays(window: Document) -> list[str]:
    """A line with the token ids of a window, and a line for each of its arrays."""
    lines = [f"ids {' '.join(map(str, window['ids']))}"]
    for name, array in window["arrays"].items():
        words = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in array.tolist()]
        lines.append(f"{name} {' '.join(words)}")
    return lines
