"""Sources of frameworks that are on no index: the adapters are tested with the frameworks' own classes, or not at all.

`make adapters-test SOURCES=folder` tests with `folder/NAME`, a checkout of each framework at the commit below.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMITS = {
    "slime": "624b824a898ab0ec1fcb4d373004c7f3852bf515",
    "miles": "31f1ca961a94cb860cec3b2dea34ec332bfa8f76",
    "skyrl": "a9564572eb8e91076be43c1bd5e4615e3de17265",
}
"""The commits that the table in docs/record/adapters.md was shown with. On GitHub: THUDM/slime, radixark/miles and
NovaSky-AI/SkyRL."""
VARIABLE = "REPLAY_SOURCES"
ANY = "REPLAY_ANY_COMMIT"
"""Is set where the sources may be at other commits: `make adapters-latest`."""


def missing(framework: str) -> str:
    """Why the source of a framework is not there, or of another commit; empty: it can be imported from now on."""
    named = os.environ.get(VARIABLE)
    if not named:
        return f"{VARIABLE} names no folder with the source of {framework}: make adapters-test SOURCES=folder"
    folder = Path(named, framework).resolve()
    if not folder.is_dir():
        return f"{named} has no folder {framework}"
    if ANY not in os.environ and (folder / ".git").exists() and (found := commit_of(folder)) != COMMITS[framework]:
        return f"{folder} is at {found[:10]}, and the adapter is tested at {COMMITS[framework][:10]}"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last: each has folders such as `tests` and `tools`
    return ""


def commit_of(folder: Path) -> str:
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return done.stdout.strip()
