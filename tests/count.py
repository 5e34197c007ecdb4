"""Counts the code: lines, files, and floors, which are the files of the longest chain of imports. `make count`.

A line counts if it has a token of code. Docstrings, comments, blank lines and generated files do not count.
"""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "replay_protos": ROOT / "protos/replay_protos",
    "replay_server": ROOT / "replay_server",
    "replay_client": ROOT / "client/replay_client",
    "replay_trainer": ROOT / "trainer/replay_trainer",
}
FEW = 40
"""Lines. A file with fewer is too small to be one, unless it is a face."""
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def files_of(folder: Path) -> list[Path]:
    """The Python files that a person wrote, sorted."""
    return [path for path in sorted(folder.rglob("*.py")) if "_pb2" not in path.name]


@cache
def modules_of(package: str) -> dict[str, Path]:
    root = PACKAGES[package]
    names = {path: ".".join((package, *path.relative_to(root).with_suffix("").parts)) for path in root.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports, as they stand there."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


@cache
def imports_of(package: str) -> dict[str, set[str]]:
    """The modules that each module of a package imports from it: at its top, in functions, for type checkers."""
    modules = modules_of(package)
    imports = {}
    for name, path in modules.items():
        found = set()
        for node in ast.walk(tree_of(path)):
            members = set()
            if isinstance(node, ast.ImportFrom) and node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
            found |= members or set(imported(node))
        imports[name] = (found & modules.keys()) - {name}
    return imports


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


def floors(package: str) -> int:
    """How many files the longest chain of imports of a package has."""
    written = {name: others - {package} for name, others in imports_of(package).items() if "_pb2" not in name}
    height: dict[str, int] = {}
    for name in TopologicalSorter(written).static_order():
        height[name] = 1 + max((height[other] for other in written.get(name, ())), default=0)
    return max(height.values())


def main() -> None:
    total_lines = total_files = 0
    print(f"{'':16}{'lines':>8}{'files':>8}{f'below {FEW}':>10}{'floors':>8}")
    folders = {name: (root, str(floors(name))) for name, root in PACKAGES.items()}
    folders |= {name: (ROOT / name, "") for name in ("examples", "experiments", "benchmarks", "tests")}
    for name, (root, height) in folders.items():
        sources = [path.read_text() for path in files_of(root)]
        counts = [code_lines(source) for source in sources]
        few = sum(len(source.splitlines()) < FEW for source in sources)
        print(f"{name:16}{sum(counts):>8,}{len(counts):>8}{few:>10}{height:>8}")
        if name in PACKAGES:
            total_lines, total_files = total_lines + sum(counts), total_files + len(counts)
    print(f"{'all packages':16}{total_lines:>8,}{total_files:>8}")


if __name__ == "__main__":
    main()
