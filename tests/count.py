"""Counts the code: lines, tokens, files, and floors, which are the files of the longest chain of imports. `make count`.

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
    "replay_generator": ROOT / "client/replay_generator",
    "replay_dashboard": ROOT / "client/replay_dashboard",
    "replay_cli": ROOT / "client/replay_cli",
    "replay_trainer": ROOT / "trainer/replay_trainer",
    "replay_adapters": ROOT / "trainer/replay_adapters",
}
PARTS = {
    "protos/replay_protos": "replay_protos",
    "replay_server": "replay_server",
    "replay_server/tables": "replay_server/tables",
    "replay_server/storage": "replay_server/storage",
    "replay_server/rpc": "replay_server/rpc",
    "client/replay_client": "replay_client",
    "client/replay_generator": "replay_generator",
    "client/replay_dashboard": "replay_dashboard",
    "client/replay_cli": "replay_cli",
    "trainer/replay_trainer": "replay_trainer",
    "trainer/replay_adapters": "replay_adapters",
    "examples": "examples",
    "experiments": "experiments",
    "benchmarks": "benchmarks",
    "tests": "tests",
}
"""Which part of the code a folder, or a file, belongs to. `tests/test_project.py` has a budget for each part."""
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
    """The Python files that a person wrote in a folder, sorted; or the file itself."""
    paths = [folder] if folder.suffix == ".py" else sorted(folder.rglob("*.py"))
    return [path for path in paths if "_pb2" not in path.name]


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


@cache
def measured(path: Path) -> tuple[int, int]:
    """The lines of a file that have a token of code, and how many tokens these are."""
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        # A string as a statement of its own is a docstring: of a module, a class, a function, or a field.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in _NO_CODE]
    code = [token for token in tokens if token.start[0] not in docstrings]
    return len({line for token in code for line in range(token.start[0], token.end[0] + 1)}), len(code)


def part_of(path: Path) -> str:
    """The part for whose budget a file counts: that of the innermost folder which is one."""
    return next(
        PARTS[name] for folder in (path, *path.parents) if (name := folder.relative_to(ROOT).as_posix()) in PARTS
    )


@cache
def sizes() -> dict[str, tuple[int, int]]:
    """Lines and tokens of each part."""
    found = dict.fromkeys(PARTS.values(), (0, 0))
    for path in {path for folder in PARTS for path in files_of(ROOT / folder)}:
        (lines, tokens), part = measured(path), part_of(path)
        found[part] = found[part][0] + lines, found[part][1] + tokens
    return found


def floors(package: str) -> int:
    """How many files the longest chain of imports of a package has."""
    written = {name: others - {package} for name, others in imports_of(package).items() if "_pb2" not in name}
    height: dict[str, int] = {}
    for name in TopologicalSorter(written).static_order():
        height[name] = 1 + max((height[other] for other in written.get(name, ())), default=0)
    return max(height.values())


def main() -> None:
    print(f"{'':24}{'lines':>8}{'tokens':>9}")
    for part, (lines, tokens) in sizes().items():
        print(f"{part:24}{lines:>8,}{tokens:>9,}")
    print(f"\n{'':24}{'lines':>8}{'files':>9}{f'below {FEW}':>10}{'floors':>8}")
    total_lines = total_files = 0
    for name, root in PACKAGES.items():
        lines = sum(measured(path)[0] for path in files_of(root))
        few = sum(len(path.read_text().splitlines()) < FEW for path in files_of(root))
        print(f"{name:24}{lines:>8,}{len(files_of(root)):>9}{few:>10}{floors(name):>8}")
        total_lines, total_files = total_lines + lines, total_files + len(files_of(root))
    print(f"{'all packages':24}{total_lines:>8,}{total_files:>9}")


if __name__ == "__main__":
    main()
