"""Counts the code: lines, files, and floors, which are the files of the longest chain of imports. `make count`.

A line counts if it has a token of code. Docstrings, comments, blank lines and generated files do not count.
"""

from __future__ import annotations

import ast
import io
import tokenize
from graphlib import TopologicalSorter
from pathlib import Path

from tests.test_project import PACKAGES, ROOT, imports_of, modules_of

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_FEW = 50


def code_lines(source: str) -> int:
    """The lines of a module that have a token of code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        # A string as a statement of its own is a docstring: of a module, a class, a function, or a field.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def is_generated(path: Path) -> bool:
    return "_pb2" in path.name


def floors(package: str) -> int:
    """How many files the longest chain of imports of a package has."""
    modules = modules_of(package)
    graph = {
        name: others - {package} for name, others in imports_of(package).items() if not is_generated(modules[name])
    }
    height: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        height[name] = 1 + max((height[other] for other in graph.get(name, ())), default=0)
    return max(height.values())


def main() -> None:
    total_lines = total_files = 0
    print(f"{'':16}{'lines':>8}{'files':>8}{f'below {_FEW}':>10}{'floors':>8}")
    folders = {name: (root, str(floors(name))) for name, root in PACKAGES.items()}
    folders |= {name: (ROOT / name, "") for name in ("benchmarks", "tests")}
    for name, (root, height) in folders.items():
        sources = [path for path in sorted(root.rglob("*.py")) if not is_generated(path)]
        counts = [code_lines(path.read_text()) for path in sources]
        few = sum(len(path.read_text().splitlines()) < _FEW for path in sources)
        print(f"{name:16}{sum(counts):>8,}{len(counts):>8}{few:>10}{height:>8}")
        if name in PACKAGES:
            total_lines, total_files = total_lines + sum(counts), total_files + len(counts)
    print(f"{'all packages':16}{total_lines:>8,}{total_files:>8}")


if __name__ == "__main__":
    main()
