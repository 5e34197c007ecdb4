"""The share of the long tests that belongs to a commit, so that a week of commits sees all of them.

`make test-long` takes too long for every commit. Each commit gets a share of its files, chosen by a hash of what the
commit holds: whoever runs `make test-long-share` for the same commit runs the same files.

    python -m tests.long_share                  the files of the share, one a line
    python -m tests.long_share learn REPORT     renews long_seconds.json from a JUnit report of a whole `make test-long`
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
MEASURED = Path(__file__).with_name("long_seconds.json")
"""How long each file of long tests took, in seconds, while others ran beside it. `learn` writes it."""
UNKNOWN_SECONDS = 60.0
"""What a file that was not measured yet counts for."""
SHARE_SECONDS = 900.0 * 3
"""The seconds of the files of a share together. Several processes run them, in about a quarter of an hour."""


def long_files() -> list[str]:
    """The paths of all test files that hold a long test, from the root of the repository."""
    paths = []
    for folder in ("tests", "experiments"):
        for path in (ROOT / folder).rglob("test_*.py"):
            if "mark.long" in path.read_text():
                paths.append(str(path.relative_to(ROOT)))
    return sorted(paths)


def share(files: Sequence[str], seconds: Mapping[str, float], content: str) -> list[str]:
    """The files that fit into `SHARE_SECONDS`, in an order that the content decides."""

    def order(file: str) -> bytes:
        return hashlib.sha256(f"{content} {file}".encode()).digest()

    chosen = []
    left = SHARE_SECONDS
    for file in sorted(files, key=order):
        needed = seconds.get(file, UNKNOWN_SECONDS)
        if needed <= left:
            chosen.append(file)
            left -= needed
    return sorted(chosen)


def measured() -> dict[str, float]:
    return json.loads(MEASURED.read_text())


def learn(report: Path) -> dict[str, float]:
    """The seconds of each file in a JUnit report; pytest names the files with `junit_family=xunit1`."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        seconds[case.attrib["file"]] += float(case.attrib["time"])
    return {file: round(seconds[file], 1) for file in sorted(seconds)}


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case []:
            command = ["git", "rev-parse", "HEAD^{tree}"]
            content = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            print("\n".join(share(long_files(), measured(), content)))
        case ["learn", report]:
            MEASURED.write_text(json.dumps(learn(Path(report)), indent=1) + "\n")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
