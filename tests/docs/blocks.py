"""The code blocks of a Markdown page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """One fenced block: ```language title="..." test="skip"."""

    language: str
    title: str
    skip: bool
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    found = []
    text = page.read_text()
    for match in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        title = re.search(r'title="([^"]*)"', match[2])
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(match[1], title[1] if title else "", 'test="skip"' in match[2], match[3], line))
    return found


def write_files(page: Path, folder: Path) -> None:
    """Every block whose title is the name of a file, as that file."""
    for block in blocks(page):
        if re.fullmatch(r"[\w-]+\.(py|toml)", block.title):
            (folder / block.title).write_text(block.text)
