"""What the project says of itself is true: about its tests, the names in its pages, and the sources that it cites."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (
    *("replay_server", "client", "trainer", "protos", "docker", "docs"),
    *("tests", "examples", "experiments", "benchmarks"),
)
MARKDOWN = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
CLOCKS = {"monotonic", "perf_counter", "time", "process_time", "thread_time"}


def sources() -> list[Path]:
    """Every text of the repository that a person wrote."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.yml"), ROOT / "Makefile"]
    for folder in FOLDERS:
        for ending in ("py", "md", "toml", "yaml", "yml", "proto", "sh"):
            found += (ROOT / folder).rglob(f"*.{ending}")
    return [path for path in found if path != Path(__file__)]


# ---------------------------------------------------------------------------------------------- no asserted durations


def is_clock(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "time"
        and node.func.attr in CLOCKS
    )


def is_duration(node: ast.AST) -> bool:
    """Whether a clock's time is subtracted from another time anywhere in `node`."""
    return any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and any(map(is_clock, ast.walk(part)))
        for part in ast.walk(node)
    )


def names_of_durations(tree: ast.AST) -> set[str]:
    """Variables that hold durations, and lists that durations are appended to."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if is_duration(node.value):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            if any(map(is_duration, node.args)) and isinstance(node.func.value, ast.Name):
                names.add(node.func.value.id)
    return names


def asserted_durations(source: str) -> list[int]:
    """The lines of assertions that a slow machine could break."""
    tree = ast.parse(source)
    durations = names_of_durations(tree)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        and (
            is_duration(node.test)
            or any(isinstance(part, ast.Name) and part.id in durations for part in ast.walk(node.test))
        )
    ]


def test_no_test_asserts_a_duration():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / "tests").rglob("*.py")
        for line in asserted_durations(path.read_text())
    ]
    assert found == [], "wait with a deadline (tests.factories.until), or assert an order"


@pytest.mark.parametrize(
    "source",
    [
        "assert time.monotonic() - started < 5",
        "took = time.perf_counter() - begin\nassert took < 1",
        "slow.append(time.monotonic() - begin)\nassert max(slow) < 1",
        "longest = max(longest, time.time() - begin)\nassert longest < 0.5",
    ],
)
def test_the_rule_about_durations_finds(source):
    assert asserted_durations(source)
    assert not asserted_durations("deadline = time.monotonic() + 5\nassert time.monotonic() < deadline")


# --------------------------------------------------------------------------------------------- names in tables of pages


def table_cells(page: str) -> Iterator[tuple[str, str]]:
    """(first cell, rest of the row) of every table row whose first cell names a path of the repository."""
    for line in (ROOT / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(r"`[\w./-]+/[\w./-]*`", cells[0]):
            yield cells[0].strip("`"), " ".join(cells[1:])


PAGES = ("README.md", "CONTRIBUTING.md", "docs/explanation/architecture.md")
PACKAGES = {"replay_server": "", "client/": "client/", "trainer/": "trainer/", "protos/": "protos/"}


def module_of(path: str) -> str | None:
    """The dotted name of a module or package of ours; None for other files."""
    for start, root in PACKAGES.items():
        if path.startswith(start):
            return path.removeprefix(root).removesuffix(".py").strip("/").replace("/", ".")
    return None


@pytest.mark.parametrize("page", PAGES)
def test_every_path_and_name_in_the_tables_of_a_page_exists(page):
    rows = list(table_cells(page))
    assert len(rows) >= 4
    for path, text in rows:
        assert (ROOT / path).exists(), f"{page} names {path}"
        assert path.endswith("/") == (ROOT / path).is_dir(), f"{page}: {path}"
        module = module_of(path)
        # Class names, such as `ReplayBuffer`: they are there in the module or package of the row.
        for name in re.findall(r"`([A-Z]\w+)`", text) if module else ():
            assert hasattr(importlib.import_module(module), name), f"{page}: {path} has no {name}"
        for link in re.findall(r"`([a-z][\w-]*(?:/[\w-]*)+/?)`", text):
            assert (ROOT / link).exists() or (ROOT / path / link).exists(), f"{page} names {link}"


def test_every_make_target_in_the_pages_exists():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in MARKDOWN:
        for target in re.findall(r"(?:^    |`)(?:\w+=\S+ )*make ([a-z0-9-]+)", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page.relative_to(ROOT)}: make {target}"


def test_every_path_that_a_page_names_exists():
    named = re.compile(r"`((?:replay_server|client|trainer|protos|tests|experiments|benchmarks|docker|docs)/[\w./-]+)`")
    for page in MARKDOWN:
        if page.name == "CHANGELOG.md":
            continue
        for path in named.findall(page.read_text()):
            assert (ROOT / path).exists(), f"{page.relative_to(ROOT)} names {path}"


# ---------------------------------------------------------------------------------------------------- cited sources

HIDDEN = re.compile(r"\bfacts §|\bfacts\.md|\bdesign(?:\.md)? (?:§ ?)?\d|\brooms\.md|\bstyle\.md|\bfield\.md")
"""Pages that readers of the repository do not have."""


def test_no_text_cites_a_page_that_nobody_can_see():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if HIDDEN.search(line)
    ]
    assert found == [], "cite the public source instead"


# ------------------------------------------------------------------------------------------- what a user can install


def test_no_text_installs_a_package_that_is_on_no_index():
    told = re.compile(r"pip install[^\n]*\breplay-server\b")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if told.search(line)
    ]
    assert not wrong, f"write pip install '.[EXTRA]' in a clone of the repository: {wrong}"


def test_no_page_needs_a_package_that_only_tests_have():
    assert not [path for path in MARKDOWN if "import pytest" in path.read_text()]
