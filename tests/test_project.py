"""Rules of the project itself that protect its users or a direction.

Generated code is current, imports point one way, packages use only public names of each other, no code comes from data.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from protos.generate import generate
from tests.packages import PACKAGES, ROOT

ALLOWED = {
    "replay_protos": set(),
    "replay_server": {"replay_protos"},
    "replay_client": {"replay_protos"},
    "replay_generator": {"replay_protos", "replay_client"},
    "replay_dashboard": {"replay_protos", "replay_client", "replay_generator"},
    "replay_trainer": {"replay_client", "replay_generator"},
    "replay_adapters": {"replay_client", "replay_generator", "replay_trainer"},
    "replay_cli": PACKAGES.keys() - {"replay_adapters"},
}
# One adapter starts a server inside the trainer's process.
JOINS = (ROOT / "trainer/replay_adapters/trl.py",)
LEVELS = [
    {"errors"},
    {"tables"},
    {"config", "storage", "telemetry"},
    {"rpc"},
    {"server"},
    {"shards"},
]
"""The rooms of replay_server, lowest first: its folders and the modules beside them. Each imports lower rooms only."""


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


def test_the_generated_code_is_that_of_the_proto(tmp_path):
    generate(tmp_path)
    for path in sorted((tmp_path / "replay_protos").iterdir()):
        assert path.read_text() == (PACKAGES["replay_protos"] / path.name).read_text(), (
            f"run `make protos`: {path.name}"
        )


# ------------------------------------------------------------------------------------------------ imports


def imports_in(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        yield from imported(node)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package):
    for path in files_of(PACKAGES[package]):
        if not any(path.is_relative_to(join) for join in JOINS):
            others = {name.partition(".")[0] for name in imports_in(path)} & PACKAGES.keys() - {package}
            assert others <= ALLOWED[package], path.relative_to(ROOT)


def test_a_room_of_the_server_imports_lower_rooms_only_and_none_is_forgotten():
    level = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
    rooms = {module: module.split(".")[1] for module in modules_of("replay_server") if module != "replay_server"}
    assert set(rooms.values()) == level.keys()
    wrong = [
        f"{module} imports {other}"
        for module, room in rooms.items()
        for other in imports_of("replay_server")[module] & rooms.keys()
        if room != rooms[other] and level[room] <= level[rooms[other]]
    ]
    assert wrong == []


def test_the_tables_know_neither_grpc_nor_the_wire_nor_the_disk():
    for module, path in modules_of("replay_server").items():
        if module.startswith("replay_server.tables") or module == "replay_server.errors":
            names = set(imports_in(path)) - {"replay_protos.labels", "replay_protos.settings"}
            imported = {name.partition(".")[0] for name in names}
            assert not imported & {"grpc", "replay_protos", "lmdb"}, module


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(package):
    # The root only gives names out again. It is loaded before any of its modules, whoever imports them.
    graph = {module: others - {package} for module, others in imports_of(package).items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


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

CODE_FROM_DATA = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
"""Modules that execute what they read."""
RUNS_TEXT = ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "torch.hub.load")


def unsafe(tree: ast.AST) -> list[str]:
    """What in a module could turn data into code or commands: `line: what`."""
    found = []
    for node in ast.walk(tree):
        what = ", ".join(CODE_FROM_DATA & {module.partition(".")[0] for module in imported(node)})
        if isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            allows = any(given.get(word, "False") != "False" for word in ("shell", "allow_pickle", "trust_remote_code"))
            if allows or name in RUNS_TEXT or (name == "torch.load" and given.get("weights_only") != "True"):
                what = name
        if what:
            found.append(f"{node.lineno}: {what}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_turns_data_into_code(package):
    for path in files_of(PACKAGES[package]):
        assert unsafe(tree_of(path)) == [], path.relative_to(ROOT)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, pickle as p",
        "from dill import loads",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
        "os.system(command)",
        "subprocess.run(command, shell=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_the_rule_about_code_finds(line):
    assert unsafe(ast.parse(line))
    assert not unsafe(
        ast.parse("model.eval(); torch.load(path, weights_only=True); subprocess.run(command, shell=False)")
    )
