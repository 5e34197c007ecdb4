"""The table of clients of a page, from what was observed when they were played.

python -m tests.generator.sessions.agents.table            plays all, and renews the observations and the page
python -m tests.generator.sessions.agents.table --page     renews the page alone
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

from tests.docs.tables import renewed
from tests.generator.sessions.agents.catalog import CLIENTS, HERE
from tests.packages import ROOT

PAGE = ROOT / "docs/how-to/any-agent.md"
OBSERVED = HERE / "observed.json"
MARK = "<!-- table: python -m tests.generator.sessions.agents.table -->"
HEAD = ("client", "version", "protocol", "turns", "sequences", "refused", "needs")


def observed() -> dict[str, dict[str, Any]]:
    """What was observed of each client when all were played the last time, by name."""
    rows: list[dict[str, Any]] = json.loads(OBSERVED.read_text())
    return {row["client"]: row for row in rows}


def lines_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the table."""
    needs = {client.name: client.needs for client in CLIENTS}
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for row in rows:
        version = f"`{row['package']}` {row['version']}"
        counts = [str(row[name]) for name in ("turns", "sequences", "refused")]
        cells = [row["client"], version, row["protocol"], *counts, needs[row["client"]]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


async def play_all() -> list[dict[str, Any]]:
    """The observations of all clients. Fails where one is not there."""
    from tests.generator.sessions.agents.play import observe

    rows = []
    for client in CLIENTS:
        if not client.packages.is_there:
            raise SystemExit(f"{client.packages.folder} is not there: run make agents")
        rows.append(await observe(client))
        print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="play none, and renew the page alone")
    arguments = parser.parse_args()
    if not arguments.page:
        rows = asyncio.run(play_all())
        OBSERVED.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    PAGE.write_text(renewed(PAGE.read_text(), MARK, lines_of(list(observed().values()))))


if __name__ == "__main__":
    main()
