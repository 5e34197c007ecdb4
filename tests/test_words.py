"""What the project says of itself is true: about its tests, the names in its pages, and the sources that it cites."""

import ast
import importlib
import itertools
import re
from pathlib import Path

import pytest

from replay_protos.words import counted
from tests.docs.blocks import blocks

ROOT = Path(__file__).parent.parent
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MARKDOWN = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "experiments/README.md"]
PACKAGES = ("replay_server", "client", "trainer", "protos")
FOLDERS = (*PACKAGES, "tests", "experiments", "benchmarks", "docker", "release", "docs", "examples")
ENDINGS = (".py", ".md", ".toml", ".yaml", ".yml", ".proto", ".sh")


def lines_with(pattern: str) -> list[str]:
    """The lines of all texts of the repository that a person wrote in which the pattern is found."""
    paths = [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    found = []
    for path in paths:
        if (path.suffix in ENDINGS or path.name == "Makefile") and path != Path(__file__):
            lines = path.read_text().splitlines()
            found += [f"{path.relative_to(ROOT)}: {line.strip()}" for line in lines if re.search(pattern, line)]
    return found


# ---------------------------------------------------------------------------------------------- no asserted durations


def is_duration(node: ast.AST) -> bool:
    """Whether a time that `time` tells is a part of a difference in the node."""
    clock = re.compile(r"\btime\.(monotonic|perf_counter|time|process_time|thread_time)\(\)")
    differences = [part for part in ast.walk(node) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)]
    return any(clock.search(ast.unparse(part)) for part in differences)


def names_of_durations(tree: ast.AST) -> set[str]:
    """Variables that hold durations, and lists that durations are appended to."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and is_duration(node):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {ast.unparse(target) for target in targets}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".append") and is_duration(node):
            names.add(ast.unparse(node.func).removesuffix(".append"))
    return names


def asserted_durations(source: str) -> list[int]:
    """The lines of assertions that a slow machine could break."""
    tree = ast.parse(source)
    names = names_of_durations(tree)
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            used = {ast.unparse(part) for part in ast.walk(node.test) if isinstance(part, ast.Name | ast.Attribute)}
            if is_duration(node.test) or used & names:
                lines.append(node.lineno)
    return lines


def test_no_test_asserts_a_duration():
    found = {path.relative_to(ROOT): asserted_durations(path.read_text()) for path in TESTS}
    wrong = {path: lines for path, lines in found.items() if lines}
    assert wrong == {}, "wait with a deadline (replay_client.testing.until), or assert an order"


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


def test_no_test_but_the_soak_looks_at_the_memory_of_a_process():
    looking = [path.name for path in TESTS if "memory_info" in path.read_text() and path != Path(__file__)]
    assert looking == ["soak.py"]


# ------------------------------------------------------------------------------- what pages name, and what users can do

PAGES = ("README.md", "CONTRIBUTING.md", "docs/explanation/architecture.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_path_and_name_in_the_tables_of_a_page_exists(page):
    rows = re.findall(r"^\| `([\w./-]+/[\w./-]*)` \|(.*)\|$", (ROOT / page).read_text(), re.MULTILINE)
    assert len(rows) >= 4
    for path, text in rows:
        assert (ROOT / path).exists(), f"{page} names {path}"
        assert path.endswith("/") == (ROOT / path).is_dir(), f"{page}: {path}"
        # Class names, such as `ReplayBuffer`: they are there in the module or package of the row.
        names = re.findall(r"`([A-Z]\w+)`", text) if path.startswith(PACKAGES) else []
        for name in names:
            module = re.sub(r"^(client|trainer|protos)/|\.py$|/$", "", path).replace("/", ".")
            assert hasattr(importlib.import_module(module), name), f"{page}: {path} has no {name}"
        for link in re.findall(r"`([a-z][\w-]*(?:/[\w-]*)+/?)`", text):
            assert (ROOT / link).exists() or (ROOT / path / link).exists(), f"{page} names {link}"


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_make_target_program_and_path_that_a_page_names_exists(page):
    text = page.read_text()
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = "\n".join(block.text for block in blocks(page) if block.language in ("sh", "shell"))
    for made, where in ((r"(?:^    |`)", text), ("^", commands)):
        assert set(re.findall(rf"{made}(?:\w+=\S+ )*make ([a-z0-9-]+)", where, re.MULTILINE)) <= set(targets)
    for module in re.findall(r"python\s-m\s((?:tests|experiments|benchmarks|examples)[\w.]+)", text):
        path = ROOT / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"python -m {module}"
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS[:-1])})/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_no_text_cites_a_page_that_nobody_can_see():
    hidden = r"\bfacts §|\bdesign(?:\.md)? (?:§ ?)?\d|\b(?:facts|rooms|style|field2?|house|words)\.md"
    assert lines_with(hidden) == [], "cite the public source instead"


def test_no_text_installs_a_package_that_is_on_no_index():
    found = lines_with(r"pip install[^\n]*\breplay-server\b")
    assert found == [], "write pip install '.[EXTRA]' in a clone of the repository"


def test_no_page_needs_a_package_that_only_tests_have():
    assert not [path for path in MARKDOWN if "import pytest" in path.read_text()]


# ------------------------------------------------------------------------------------------- one item, and two items

NOUNS = (
    *("batch", "batches", "completions", "groups", "items", "permits", "prompts", "requests", "segments"),
    *("sequences", "steps", "tables", "times", "turns"),
)
ALWAYS_MANY = (
    *("groups in a row were skipped", "items; write max_size", "tables are called", "items in one message: at most"),
    *("permits: at most", "batches: at most"),
)
"""What follows a number that is never 1."""
COUNT = re.compile(rf"^ ((?:(?:more|other|fresh|stored) )?(?:{'|'.join(NOUNS)})\b.*)", re.DOTALL)


def plurals_behind_numbers(source: str) -> list[str]:
    """What stands behind the numbers of the f-strings of a module, where it is the plural of one of NOUNS."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        before = ""
        for value, behind in itertools.pairwise([*node.values, ast.Constant("")]):
            if isinstance(value, ast.Constant):
                before = str(value.value)
            elif isinstance(behind, ast.Constant) and not ast.unparse(value.value).isupper():
                match = COUNT.match(str(behind.value))
                found += [match[1]] if match and not before.endswith((" of ", "there are ")) else []
    return found


def test_a_count_of_one_is_no_plural():
    for package in (*PACKAGES, "examples"):
        for path in (ROOT / package).rglob("*.py"):
            for words in plurals_behind_numbers(path.read_text()):
                assert words.startswith(ALWAYS_MANY), f"{path}: {words}: use `counted`"
    for path in (ROOT / "client/replay_dashboard/page").glob("*.js"):
        assert not re.search(rf"\$\{{[^}}]*\}} ({'|'.join(NOUNS)})\b", path.read_text()), f"{path}: use `plural`"


@pytest.mark.parametrize(("count", "noun", "words"), [
    (0, "group", "0 groups"), (1, "group", "1 group"), (2, "batch", "2 batches"), (2, "entry", "2 entries"),
    (3, "more table", "3 more tables"), (2, "log-probability", "2 log-probabilities"),
])  # fmt: skip
def test_a_noun_agrees_with_its_count(count, noun, words):
    assert counted(count, noun) == words
