"""Rules of the project itself: current generated code, imports that point one way, small modules, no code from data."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from protos.generate import generate

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "replay_protos": ROOT / "protos/replay_protos",
    "replay_server": ROOT / "replay_server",
    "replay_client": ROOT / "client/replay_client",
    "replay_trainer": ROOT / "trainer/replay_trainer",
}
ALLOWED = {
    "replay_protos": set(),
    "replay_server": {"replay_protos"},
    "replay_client": {"replay_protos"},
    "replay_trainer": {"replay_client"},
}


def test_the_generated_code_is_that_of_the_proto(tmp_path):
    generate(tmp_path)
    for path in sorted((tmp_path / "replay_protos").iterdir()):
        assert path.read_text() == (PACKAGES["replay_protos"] / path.name).read_text(), (
            f"run `make protos`: {path.name}"
        )


# The commands join all packages, and one adapter starts a server inside the trainer's process.
JOINS = (ROOT / "replay_server/cli", ROOT / "trainer/replay_trainer/integrations/trl.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package):
    for path in PACKAGES[package].rglob("*.py"):
        if any(path.is_relative_to(join) for join in JOINS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                other = name.partition(".")[0]
                if other in PACKAGES and other != package:
                    assert other in ALLOWED[package], f"{path.relative_to(ROOT)} imports {name}"


LEVELS = [
    {"errors", "limits"},
    {"tables"},
    {"config", "storage", "telemetry"},
    {"rpc"},
    {"server"},
    {"shards"},
    {"cli"},
]
"""The rooms of replay_server, lowest first: its folders and the modules beside them. Each imports lower rooms only."""
MAX_LEVELS, MAX_LINES, MAX_NESTING = 7, 700, 5


@cache
def modules_of(package: str) -> dict[str, Path]:
    root = PACKAGES[package]
    names = {path: ".".join((package, *path.relative_to(root).with_suffix("").parts)) for path in root.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


@cache
def imports_of(package: str) -> dict[str, set[str]]:
    """The modules that each module of a package imports from it: at its top, in functions, for type checkers."""
    modules = modules_of(package)
    imports = {}
    for name, path in modules.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= members & modules.keys() or {node.module}
        imports[name] = (found & modules.keys()) - {name}
    return imports


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_the_rooms_of_the_server_have_no_more_than_seven_levels_and_none_is_forgotten():
    assert len(LEVELS) <= MAX_LEVELS
    rooms = {room_of(module) for module in modules_of("replay_server") if module != "replay_server"}
    assert rooms == set().union(*LEVELS)


def test_a_room_of_the_server_imports_lower_rooms_only():
    level = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
    wrong = [
        f"{module} imports {other}"
        for module, others in imports_of("replay_server").items()
        for other in others
        if "replay_server" not in (module, other)
        if room_of(module) != room_of(other) and level[room_of(module)] <= level[room_of(other)]
    ]
    assert wrong == []


def test_the_tables_know_neither_grpc_nor_the_wire_nor_the_disk():
    for module, path in modules_of("replay_server").items():
        if module.startswith("replay_server.tables") or module in ("replay_server.errors", "replay_server.limits"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                assert not {name.partition(".")[0] for name in names} & {"grpc", "replay_protos", "lmdb"}, module


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(package):
    # The root only gives names out again. It is loaded before any of its modules, whoever imports them.
    graph = {module: others - {package} for module, others in imports_of(package).items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("package", ["replay_server", "replay_client", "replay_trainer"])
def test_modules_are_short_and_functions_flat(package):
    wrong = []
    for path in modules_of(package).values():
        source = path.read_text()
        if (lines := len(source.splitlines())) > MAX_LINES:
            wrong.append(f"{path.relative_to(ROOT)} has {lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (depth := nesting(node.body)) > MAX_NESTING:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} is nested {depth} levels deep")
    assert wrong == []


def nesting(body: list[ast.stmt]) -> int:
    """The most statements that contain each other. A nested function begins anew; `elif` is as deep as its `if`."""
    deepest = 0
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        if isinstance(statement, ast.If) and len(statement.orelse) == 1 and isinstance(statement.orelse[0], ast.If):
            deepest = max(deepest, nesting(statement.orelse))
            blocks.remove(statement.orelse)
        blocks += [part.body for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))]
        if any(blocks):
            deepest = max(deepest, 1 + max(map(nesting, blocks)))
    return deepest


@pytest.mark.parametrize(
    ("source", "depth"),
    [
        ("return 1", 0),
        ("if a:\n pass\nelif b:\n pass\nelif c:\n pass", 1),
        ("if a:\n pass\nelse:\n if b:\n  pass\n c()", 2),
        ("try:\n pass\nexcept E:\n for a in b:\n  pass", 2),
        ("match a:\n case 1:\n  while b:\n   pass", 2),
        ("async def f():\n if a:\n  if b:\n   pass", 0),
    ],
)
def test_nesting_counts_the_statements_around_a_statement(source, depth):
    assert nesting(ast.parse(source).body) == depth


CODE_FROM_DATA = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
"""Modules that execute what they read."""


def unsafe(source: str) -> list[str]:
    """What in a module could turn data into code or commands: `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        what = ""
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            what = ", ".join(CODE_FROM_DATA & {(module or "").partition(".")[0] for module in modules})
        elif isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if (
                name
                in ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "torch.hub.load")
                or given.get("shell", "False") != "False"
                or given.get("allow_pickle", "False") != "False"
                or given.get("trust_remote_code", "False") != "False"
                or (name == "torch.load" and given.get("weights_only") != "True")
            ):
                what = name
        if what:
            found.append(f"{node.lineno}: {what}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_turns_data_into_code(package):
    for path in PACKAGES[package].rglob("*.py"):
        assert unsafe(path.read_text()) == [], path.relative_to(ROOT)


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
    assert unsafe(line)
    assert not unsafe("model.eval(); torch.load(path, weights_only=True); subprocess.run(command, shell=False)")
