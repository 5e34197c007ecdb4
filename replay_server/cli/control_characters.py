"""Makes texts of servers and groups safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with control characters written out, which could move the cursor or worse. Newlines and tabs stay."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else repr(character)[1:-1] for character in text
    )
