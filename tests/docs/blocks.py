"""The code blocks of a Markdown page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SKIP = "<!-- test: skip -->"
"""The line above a block that the tests do not run. In the fence itself, mkdocs would not take it for one."""
_BLOCK = re.compile(rf"^({SKIP}\n)?```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OPTIONS = re.compile(r'(?: title="([^"]*)")?')
"""What may follow the language. With any other option mkdocs renders the block, and what follows it, as prose."""


@dataclass(frozen=True)
class Block:
    """One fenced block: ```language title="..."."""

    language: str
    title: str
    skip: bool
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    found = []
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(4)) + 1
        options = _OPTIONS.fullmatch(match[3])
        assert options is not None, f"{page.name}, line {line - 1}: a fence has a title and nothing else, not{match[3]}"
        found.append(Block(match[2], options[1] or "", match[1] is not None, match[4], line))
    return found


def write_files(page: Path, folder: Path) -> None:
    """Every block whose title is the name of a file, as that file."""
    for block in blocks(page):
        if re.fullmatch(r"[\w-]+\.(py|toml)", block.title):
            (folder / block.title).write_text(block.text)
