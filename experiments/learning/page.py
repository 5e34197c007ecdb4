"""Renews the tables of a page from the results that they come from.

    python -m experiments.learning.page docs/record/learning.md

Above each table of the page stands what it is made of, in a comment: `table: FILE TASK…`, all tasks if none is named.
`report` prints all else that a file of results holds.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from experiments.learning.records import read_records
from experiments.learning.report import short_table

_MARK = re.compile(r"<!-- table: (\S+)((?: [^\s-][^\s]*)*) -->")


def renewed(text: str, root: Path) -> str:
    """The text of a page with its tables as the files below `root` have them now."""
    lines: list[str] = []
    skipping = False
    for line in text.splitlines():
        found = _MARK.fullmatch(line)
        if found is not None:
            tasks = found[2].split()
            records = [each for each in read_records(root / found[1]) if not tasks or each["task"] in tasks]
            lines += [line, "", *short_table(records), ""]
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
