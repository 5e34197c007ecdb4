"""Mutations: the pieces of a function that can be made wrong, and the source text with one of them wrong."""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("replay_server", "client", "trainer", "protos")
GENERATED = ("_pb2.py", "_pb2_grpc.py", "_pb2.pyi")
KINDS = ("comparison", "constant", "branch", "call", "exception")
"""A comparison is turned, a constant off by one, a branch skipped, a call left out, an exception swallowed."""
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NEWEST = (
    "client/replay_generator/rollouts/sessions/",
    "client/replay_generator/prompts/",
    "client/replay_generator/rewards/",
    "trainer/replay_adapters/",
)
"""Where features are newest: a tenth of the sample comes from here."""


@dataclass(frozen=True)
class Mutant:
    """One fault, by what does not change when code moves."""

    function: str
    """The qualified name of the function, such as `Table.insert`."""
    kind: str
    """One of KINDS."""
    piece: str
    """The piece that becomes wrong, as `ast.unparse` writes it."""
    number: int
    """Which of the pieces of the function that read the same, from 0."""
    path: str
    """The file in which it was found first; it may lie elsewhere today."""


@dataclass(frozen=True)
class Site:
    """Where a mutant lies in today's source."""

    path: Path
    line: int
    """The first line of the piece, from 1."""
    begin: int
    """The first byte of the piece in the file."""
    end: int
    text: str
    """What stands there instead."""

    def planted(self, source: bytes) -> bytes:
        """The source of the file with the fault in it."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


def sources() -> list[Path]:
    """The files of all packages that a person wrote."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in paths if not path.name.endswith(GENERATED)]


def functions_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """All functions below a node with their qualified names."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, FUNCTIONS):
            yield prefix + child.name, child
            yield from functions_of(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from functions_of(child, f"{prefix}{child.name}.")
        else:
            yield from functions_of(child, prefix)


def parts_of(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's body in the order of the text, without functions and classes inside of it.

    The inside of an f-string is left out: Python 3.11 does not know where it stands.
    """
    waiting = list(reversed(getattr(function, "body", [])))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.JoinedStr)):
            continue
        yield node
        if isinstance(node, ast.AnnAssign):
            waiting.extend([] if node.value is None else [node.value])
        else:
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))


def faults_of(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """What can be made wrong at a node: kind, piece, and the text in the place of the piece."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        turned = ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators)
        yield "comparison", node, f"({ast.unparse(turned)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant", node, f"({node.value + 1})"
    elif isinstance(node, ast.If):
        yield "branch", node.test, "False"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield "call", node, "pass"
    elif isinstance(node, ast.Raise):
        yield "exception", node, "pass"


def mutants_of(path: Path) -> Iterator[tuple[Mutant, Site]]:
    """All mutants of a file, each with its place."""
    source = path.read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    for name, function in functions_of(ast.parse(source)):
        seen: Counter[tuple[str, str]] = Counter()
        for node in parts_of(function):
            for kind, piece, text in faults_of(node):
                words = ast.unparse(piece)
                number = seen[kind, words]
                seen[kind, words] += 1
                begin = begins[piece.lineno - 1] + piece.col_offset
                end = begins[piece.end_lineno - 1] + piece.end_col_offset
                mutant = Mutant(name, kind, words, number, str(path.relative_to(ROOT)))
                yield mutant, Site(path, piece.lineno, begin, end, text)


def drawn(count: int, seed: int) -> list[Mutant]:
    """A sample of all mutants, a tenth of it from NEWEST. Each kind is drawn as often as the others."""
    every = [mutant for path in sources() for mutant, _ in mutants_of(path)]
    newest = [mutant for mutant in every if mutant.path.startswith(NEWEST)]
    generator = random.Random(seed)
    chosen = _of_each_kind(newest, count // 10, generator)
    others = [mutant for mutant in every if mutant not in set(chosen)]
    return chosen + _of_each_kind(others, count - len(chosen), generator)


def _of_each_kind(mutants: Iterable[Mutant], count: int, generator: random.Random) -> list[Mutant]:
    by_kind: dict[str, list[Mutant]] = {kind: [] for kind in KINDS}
    for mutant in mutants:
        by_kind[mutant.kind].append(mutant)
    for each in by_kind.values():
        generator.shuffle(each)
    chosen = []
    for number in range(count):
        chosen.append(by_kind[KINDS[number % len(KINDS)]].pop())
    return chosen


def find(mutants: Sequence[Mutant]) -> dict[Mutant, Site | None]:
    """Where each mutant lies today. None: its function or its piece is gone, or several have both."""
    places: dict[tuple[str, str, str, int], list[Site]] = {}
    for path in sources():
        for mutant, site in mutants_of(path):
            places.setdefault((mutant.function, mutant.kind, mutant.piece, mutant.number), []).append(site)
    found: dict[Mutant, Site | None] = {}
    for mutant in mutants:
        sites = places.get((mutant.function, mutant.kind, mutant.piece, mutant.number), [])
        at_home = [site for site in sites if site.path == ROOT / mutant.path]
        if at_home:
            found[mutant] = at_home[0]
        elif len(sites) == 1:
            found[mutant] = sites[0]
        else:
            found[mutant] = None
    return found
