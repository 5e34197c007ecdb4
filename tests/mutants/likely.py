"""Likely tests: the test files that import a mutant's module or name its function, found without running them.

Most mutants are killed by such a file within seconds, and need no reach, which takes as long as all tests.
"""

from __future__ import annotations

import ast
import json
import math
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutations import PACKAGES, ROOT, sources
from tests.mutants.reach import FOLDER, test_files

SECONDS_FILE = FOLDER / "seconds"
"""How long each test file took when it was run last, as JSON: learned while judging, and of use for the order only."""
UNKNOWN_SECONDS = 8.0
"""What a test file is taken to need that was never run."""
IMPORTED = 8.0
IMPORTED_BY_HELPER = 4.0
IMPORTED_BY_MODULE = 1.0
"""The points of a test file that imports the module, whose helpers import it, or that imports a module which does."""
NAMED = 10.0
"""The points of the only test file that names a part of the function's name. Of n files, each has so many over √n."""
NEAR = 2.0
"""The points for each word of the test file's path that is a word of the module's path, or of the function's name."""
QUOTED = 30.0
"""The points of the only test file that has three successive words of a text in the mutant's statement, such as an
error. Of n files, each has so many over √n."""
FEWEST_POINTS = 2.0
"""A test file with fewer is not likely to find a mutant."""


@dataclass(frozen=True)
class _TestFile:
    """A test file, as its text shows it."""

    path: str
    text: str
    words: frozenset[str]
    """The identifiers in its text."""
    modules: frozenset[str]
    """The modules of the packages that it imports."""
    by_helpers: frozenset[str]
    """The modules of the packages that the helpers import which it imports."""
    by_modules: frozenset[str]
    """The modules of the packages that those modules import."""

    def imports(self, module: str) -> float:
        """The points for how it imports a module."""
        if module in self.modules:
            return IMPORTED
        if module in self.by_helpers:
            return IMPORTED_BY_HELPER
        if module in self.by_modules:
            return IMPORTED_BY_MODULE
        return 0.0


class LikelyTests:
    """All test files, with what they import and name."""

    def __init__(self) -> None:
        imports = _Imports()
        helpers = {_module_of(path): path for path in (ROOT / "tests").rglob("*.py")}
        by_helper = {name: imports.of(path) for name, path in helpers.items()}
        by_module = {name: imports.of(path) for name, path in imports.paths.items()}
        self.files = [_test_file(path, by_helper, by_module, imports) for path in test_files()]
        self.seconds: dict[str, float] = json.loads(SECONDS_FILE.read_text()) if SECONDS_FILE.exists() else {}
        self._lock = threading.Lock()

    def likely(self, function: str, path: str, line: int) -> list[str]:
        """The test files that may find a mutant in a line of a function, the likeliest and quickest first."""
        module = _module_of(ROOT / path)
        scores = {file.path: file.imports(module) for file in self.files}
        for part in function.split("."):
            naming = [file.path for file in self.files if part in file.words and not part.startswith("__")]
            for test in naming:
                scores[test] += NAMED / math.sqrt(len(naming))
        names = _words(path) | _words(function)
        for test in scores:
            scores[test] += NEAR * len(_words(test) & names)
        quoted = dict.fromkeys(scores, 0.0)
        for quote in _quotes(ROOT / path, line):
            quoting = [file.path for file in self.files if quote in file.text]
            for test in quoting:
                quoted[test] = max(quoted[test], QUOTED / math.sqrt(len(quoting)))
        for test, points in quoted.items():
            scores[test] += points

        def order(test: str) -> float:
            return -scores[test] / (1.0 + self.expected_seconds(test))

        return sorted((test for test, score in scores.items() if score >= FEWEST_POINTS), key=order)

    def expected_seconds(self, test: str) -> float:
        return self.seconds.get(test, UNKNOWN_SECONDS)

    def note(self, test: str, seconds: float) -> None:
        """Stores how long a test file took."""
        with self._lock:
            self.seconds[test] = seconds
            FOLDER.mkdir(exist_ok=True)
            SECONDS_FILE.write_text(json.dumps(self.seconds))


class _Imports:
    """Which modules of the packages the imports in a file mean."""

    def __init__(self) -> None:
        self.paths = {_module_of(path): path for path in sources()}
        self._defined: dict[tuple[str, str], set[str]] = {}
        """By a package and a name: the modules that define it. A package hands on names of its modules."""
        for module, path in self.paths.items():
            for node in ast.parse(path.read_bytes()).body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    self._defined.setdefault((module.partition(".")[0], node.name), set()).add(module)

    def of(self, path: Path) -> set[str]:
        """The modules of the packages, and of the tests, that a file imports."""
        modules = set()
        for module, name in _imported(path):
            if module in self.paths or module.startswith("tests."):
                modules.add(module)
            if f"{module}.{name}" in self.paths or module == "tests":
                modules.add(f"{module}.{name}")
            modules |= self._defined.get((module.partition(".")[0], name), set())
        return modules


def _test_file(
    path: str, by_helper: dict[str, set[str]], by_module: dict[str, set[str]], imports: _Imports
) -> _TestFile:
    text = (ROOT / path).read_text()
    modules = imports.of(ROOT / path)
    helpers = set(_below(modules & by_helper.keys(), by_helper))
    by_helpers = {module for helper in helpers for module in by_helper[helper]}
    reached = modules | by_helpers
    return _TestFile(
        path,
        text=text,
        words=frozenset(re.findall(r"\w+", text)),
        modules=frozenset(modules),
        by_helpers=frozenset(by_helpers),
        by_modules=frozenset(_below(reached & by_module.keys(), by_module)),
    )


def _below(begin: Iterable[str], imports: dict[str, set[str]]) -> Iterator[str]:
    """All that is imported from `begin`, at first hand or at further ones, and `begin` itself."""
    seen: set[str] = set()
    waiting = list(begin)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        waiting.extend(imports[name] & imports.keys())


def _imported(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each import in a file; the name is empty if the module alone is imported."""
    package = _module_of(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                yield module, alias.name


def _module_of(path: Path) -> str:
    """The dotted name by which a file is imported."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in PACKAGES and parts[0] != "replay_server":
        del parts[0]
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def _words(names: str) -> set[str]:
    """The words that a path or a qualified name is made of."""
    words = re.findall(r"[A-Z]?[a-z0-9]+", names)
    return {word.lower().rstrip("s") for word in words} - {"py", "test", "replay"}


def _quotes(path: Path, line: int) -> set[str]:
    """Three successive words each of the texts in the innermost statement around a line."""
    tree = ast.parse(path.read_bytes())
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno]
    innermost = max(around, key=lambda node: node.lineno)
    quotes = set()
    for node in ast.walk(innermost):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split()
            quotes |= {" ".join(words[start : start + 3]) for start in range(len(words) - 2)}
    return quotes
