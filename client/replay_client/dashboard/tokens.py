"""TokenText: decodes token ids into text, with the tokenizer.json of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WARM_UP = 16
"""Tokens that are decoded before a window. The text of a token can depend on the tokens before it."""


class TokenText:
    """Decodes with one tokenizer. Without one, `source` is empty and the page shows ids."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: a folder with a tokenizer.json, or the file. Raises ValueError if it is neither."""
        self.source = ""
        self._tokenizer: Any = None
        if path is not None:
            self.load(path)

    def load(self, path: Path) -> None:
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(
                f"{path} has no tokenizer.json; AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes one"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises nothing more specific
            raise ValueError(f"{file} is not a tokenizer: {str(error)[:200]}") from error
        self.source = str(path)

    def find(self, weights: str) -> None:
        """Loads the tokenizer of a published weights folder, if it has one and no tokenizer is loaded."""
        if not self.source and weights and (Path(weights) / "tokenizer.json").is_file():
            self.load(Path(weights))

    def text(self, ids: Sequence[int]) -> str:
        """The text of all ids; empty without a tokenizer."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if self.source else ""

    def pieces(self, ids: Sequence[int], start: int, stop: int) -> list[str] | None:
        """The text of each token from `start` to `stop`; None without a tokenizer.

        The pieces joined are the text. A token that ends in the middle of a character has an empty piece, and the next
        token has the whole character.
        """
        if not self.source:
            return None
        from tokenizers.decoders import DecodeStream

        first = max(0, start - _WARM_UP)
        stream, pieces = DecodeStream(skip_special_tokens=False), []
        for token in ids[first:stop]:
            if token < 0 or self._tokenizer.id_to_token(token) is None:
                pieces.append(f"⟨{token}⟩")
            else:
                pieces.append(stream.step(self._tokenizer, token) or "")
        return pieces[start - first :]
