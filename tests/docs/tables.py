"""Tables of a page that a program writes. Above each stands a comment, its mark, with the command that writes it."""

from __future__ import annotations

from collections.abc import Sequence


def table_of(page: str, mark: str) -> list[str]:
    """The lines of the table that stands below a mark."""
    lines = []
    for line in page.partition(mark)[2].lstrip("\n").splitlines():
        if not line.startswith("|"):
            break
        lines.append(line)
    return lines


def renewed(page: str, mark: str, table: Sequence[str]) -> str:
    """The text of a page with these lines as the table below a mark. Raises ValueError if the page lacks the mark."""
    before, found, after = page.partition(mark)
    if not found:
        raise ValueError(f"the page has no line {mark!r}: write it where the table is to stand")
    rest = "\n".join(after.lstrip("\n").splitlines()[len(table_of(page, mark)) :]).strip("\n")
    text = "\n".join(table)
    return f"{before}{mark}\n\n{text}\n\n{rest}\n"
