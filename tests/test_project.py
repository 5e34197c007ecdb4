"""Rules of the project itself that protect its users or a direction.

Generated code is current, packages use only public names of each other, no code comes from data. Which way imports
point is in pyproject.toml, for import-linter; what ruff has a rule for is there too. `make lint` runs both.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from protos.generate import generate
from tests.packages import PACKAGES, ROOT


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


def test_the_generated_code_is_that_of_the_proto(tmp_path):
    generate(tmp_path)
    for path in sorted((tmp_path / "replay_protos").iterdir()):
        assert path.read_text() == (PACKAGES["replay_protos"] / path.name).read_text(), (
            f"run `make protos`: {path.name}"
        )


# ------------------------------------------------------------------------------------------------ public names


PUBLIC = {
    "replay_protos": {module.partition(".")[2] for module in modules_of("replay_protos")},
    "replay_server": {"config", "shards", "storage.checkpoints", "tables.config"},
    "replay_client": {
        *("access", "columns", "errors", "kept", "records", "rollout", "scoring", "settings", "tracing", "waits"),
    },
    "replay_generator": {
        *("config", "engines", "environments", "frequencies", "model_checks", "prompts", "remote_weights", "rewards"),
        *("rollouts", "row_files", "sessions", "stored_prompts", "user_code", "weights"),
    },
    "replay_dashboard": {"app", "diagnosis", "group", "turns", "units"},
    "replay_trainer": {"config", "correction", "leases", "metrics", "weights"},
    "replay_cli": set(),
    "replay_adapters": set(),
}
"""The modules of a package that others may import, beside the package itself."""


def imports_across(package: str) -> Iterator[tuple[str, str]]:
    """The modules of other packages that a package imports from, each with a name."""
    for path in files_of(PACKAGES[package]):
        for node in ast.walk(tree_of(path)):
            for module in imported(node):
                if module.partition(".")[0] in PACKAGES.keys() - {package}:
                    names = node.names if isinstance(node, ast.ImportFrom) else ()
                    yield from ((module, alias.name) for alias in names)


def given(module: str) -> set[str]:
    """The names that a module gives to others: those in its `__all__`; without one, those that it defines."""
    defined: set[str] = set()
    for node in tree_of(modules_of(module.partition(".")[0])[module]).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        for target in getattr(node, "targets", [getattr(node, "target", node)]):
            names = (
                {part.id for part in ast.walk(target) if isinstance(part, ast.Name)} if target is not node else set()
            )
            if "__all__" in names and isinstance(node, ast.Assign):
                return set(ast.literal_eval(node.value))
            defined |= names
    return {name for name in defined if not name.startswith("_")}


@pytest.mark.parametrize("package", PACKAGES)
def test_other_packages_import_only_public_names(package):
    private = set()
    for module, name in imports_across(package):
        root, _, inside = module.partition(".")
        if inside not in PUBLIC[root] | {""}:
            private.add(module)
        elif name not in PUBLIC[root] and "_pb2" not in module and name not in given(module):
            private.add(f"{module}: {name}")
    assert private == set()


def test_a_client_of_one_server_loads_no_module_about_shards():
    code = (
        "import sys, replay_client; replay_client.AsyncReplayClient('127.0.0.1:1');"
        "print(*(name for name in sys.modules if name.startswith('replay_client')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = done.stdout.split()
    assert "replay_client.aio" in loaded
    assert not [name for name in loaded if name.startswith("replay_client.shards")]


# ------------------------------------------------------------------------------------------------ tests

MEASURERS = ("tests/system/soak.py",)
"""The only files of tests that look at the memory of a process: over many minutes, for growth."""


def test_no_test_asserts_the_memory_of_a_process():
    for path in files_of(ROOT / "tests"):
        looks = any(isinstance(node, ast.Attribute) and node.attr == "memory_info" for node in ast.walk(tree_of(path)))
        name = path.relative_to(ROOT).as_posix()
        assert not looks or name in MEASURERS, name


# ------------------------------------------------------------------------------------------------ code from data

NEVER = ("allow_pickle", "trust_remote_code")
"""Arguments of a call that turn data into code. ruff has rules for modules and functions, and none for these."""


def is_unsafe(call: ast.Call) -> bool:
    """Whether a call could turn data into code."""
    name = ast.unparse(call.func)
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if name in ("compile", "__import__"):
        return True
    if name == "torch.load" and given.get("weights_only") != "True":
        return True
    return any(given.get(word, "False") != "False" for word in NEVER)


def unsafe(tree: ast.AST) -> list[str]:
    """The unsafe calls in a module: `line: call`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [f"{call.lineno}: {ast.unparse(call)}" for call in calls if is_unsafe(call)]


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_turns_data_into_code(package):
    for path in files_of(PACKAGES[package]):
        assert unsafe(tree_of(path)) == [], path.relative_to(ROOT)


@pytest.mark.parametrize(
    "line",
    [
        "__import__(name)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_the_rule_about_code_finds(line):
    assert unsafe(ast.parse(line))
    assert not unsafe(ast.parse("model.eval(); torch.load(path, weights_only=True); re.compile(text)"))
