"""Renews the tables of a page from the results that they come from.

    python -m experiments.learning.page docs/record/learning.md

Above each table of the page stands what makes it, in a comment: `table: KIND FILE [ARGUMENTS]`.

    arms FILE TASK…                  report.table; with tasks, of these alone
    short FILE TASK…                 report.short_table
    variety FILE TASK…               report.variety_table
    pairs FILE ARM:BASELINE…         report.pair_table
    look FILE PARTS                  real.look.look
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from experiments.learning import report
from experiments.learning.real.look import look
from experiments.learning.run import read_records

_MARK = re.compile(r"<!-- table: (\w+) (\S+)((?: [^\s-][^\s]*)*) -->")


def lines_of(kind: str, path: Path, arguments: list[str]) -> list[str]:
    """The Markdown lines of one table. Raises ValueError for a kind that is none."""
    if kind == "look":
        return look(json.loads(path.read_text()), int(arguments[0]))
    records = read_records(path)
    if kind == "pairs":
        return report.pair_table(
            records, [(arm, other) for arm, _, other in (each.partition(":") for each in arguments)]
        )
    if arguments:
        records = [record for record in records if record["task"] in arguments]
    if kind == "arms":
        return report.table(records)
    if kind == "short":
        return report.short_table(records)
    if kind == "variety":
        return report.variety_table(records)
    raise ValueError(f"a table is made of arms, short, variety, pairs or look, not of {kind!r}")


def renewed(text: str, root: Path) -> str:
    """The text of a page with its tables as the files below `root` have them now."""
    lines: list[str] = []
    skipping = False
    for line in text.splitlines():
        if found := _MARK.fullmatch(line):
            kind, name, arguments = found.groups()
            lines += [line, "", *lines_of(kind, root / name, arguments.split()), ""]
            skipping = True
        elif skipping and (not line or line.startswith("|")):
            continue
        else:
            skipping = False
            lines.append(line)
    return "\n".join(lines).rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+")
    arguments: Any = parser.parse_args()
    for page in arguments.pages:
        page.write_text(renewed(page.read_text(), Path()))


if __name__ == "__main__":
    main()
