"""Rules of the project itself: generated code that is current, imports that point one way, files of a good size.

Where the code does not keep a rule yet, the rule has today's number as its bound, or a list of exceptions: lower the
number and shorten the list when the code gets better, never the other way.
"""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from protos.generate import generate
from tests.count import (
    FEW,
    PACKAGES,
    ROOT,
    files_of,
    floors,
    imported,
    imports_of,
    measured,
    modules_of,
    sizes,
    tree_of,
)

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
    "replay_server": {"config", "shards", "tables.config"},
    "replay_client": {
        *("access", "columns", "errors", "kept", "records", "rollout", "scoring", "settings", "tracing", "waits"),
    },
    "replay_generator": {
        *("config", "engines", "environments", "prompts", "remote_weights", "rewards", "rollouts", "sessions"),
        *("stored_prompts", "weights"),
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


# ------------------------------------------------------------------------------------------------ size

MAX_CODE = {
    "replay_protos": (658, 5_766),
    "replay_server": (1_175, 9_698),
    "replay_server/tables": (3_384, 35_052),
    "replay_server/storage": (1_534, 15_837),
    "replay_server/rpc": (2_150, 20_779),
    "replay_client": (4_904, 47_344),
    "replay_generator": (6_216, 59_312),
    "replay_dashboard": (1_804, 20_550),
    "replay_cli": (2_874, 27_598),
    "replay_trainer": (4_033, 39_547),
    "replay_adapters": (2_325, 23_896),
    "examples": (775, 7_174),
    "experiments": (4_453, 46_973),
    "benchmarks": (2_293, 21_371),
    "tests": (40_177, 436_620),
}
"""Lines and tokens of code of each part (`tests/count.py`). A commit that cuts lowers them; no other changes them."""
MAX_P95 = {
    "replay_protos": 20,
    "replay_server": 24,
    "replay_client": 25,
    "replay_generator": 29,
    "replay_dashboard": 24,
    "replay_cli": 33,
    "replay_trainer": 33,
    "replay_adapters": 32,
}
"""Lines of a function, docstring and comments included: 95 of 100 functions of a package have no more."""


@pytest.mark.parametrize("part", MAX_CODE)
def test_a_part_keeps_its_budget(part):
    (lines, tokens), (most_lines, most_tokens) = sizes()[part], MAX_CODE[part]
    assert (max(lines, most_lines), max(tokens, most_tokens)) == MAX_CODE[part], "cut elsewhere in this part"


def test_each_part_has_a_budget():
    assert MAX_CODE.keys() == sizes().keys()


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_are_short(package):
    lengths = sorted(
        (function.end_lineno or 0) - function.lineno + 1
        for path in files_of(PACKAGES[package])
        for function in functions(tree_of(path))
    )
    assert lengths[len(lengths) * 95 // 100] <= MAX_P95[package]


# ------------------------------------------------------------------------------------------------ files

MAX_LINES, MAX_FLOORS, MAX_FILES, MAX_PARAMETERS, MAX_NESTING, MAX_TAKERS = 700, 13, 16, 10, 5, 5
VERBS = ("take", "give_back", "start", "put", "load")
"""Of the domain. Each means one thing, and so it is on few classes."""
WRITTEN = [path for root in PACKAGES.values() for path in files_of(root)]
FULL = {"client/replay_client": 20, "tests/system": 24, "tests/trainer": 24}
SMALL = {"event_loop"}
BESIDE = ("tests", "examples", "experiments", "benchmarks")
WIDE = {"list_items": 12}
TAKERS = {"take": 10, "start": 10, "give_back": 8, "load": 6, "put": 8}
TWICE = {"Budget", "Policy", "Item", "Prompt", "Run"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_a_module_has_700_lines_at_most():
    found = {name_of(path): len(path.read_text().splitlines()) for path in [*WRITTEN, *files_of(ROOT / "tests")]}
    assert {name: lines for name, lines in found.items() if lines > MAX_LINES} == {}


def test_a_module_has_40_lines_at_least_unless_it_is_a_face():
    small = {path for path in WRITTEN if len(path.read_text().splitlines()) < FEW}
    assert {name_of(path) for path in small if path.stem not in ("__init__", "__main__", *SMALL)} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_chain_of_imports_is_longer_than_13_files(package):
    assert floors(package) <= MAX_FLOORS


def test_a_client_of_one_server_loads_32_files_and_3800_lines_at_most():
    code = (
        "import sys, replay_client; replay_client.AsyncReplayClient('127.0.0.1:1');"
        "print(*(each.__file__ for name, each in sys.modules.items() if name.split('.')[0] == 'replay_client'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    files = [Path(name) for name in done.stdout.split()]
    assert len(files) <= 32
    assert sum(measured(path)[0] for path in files) <= 3_800
    assert not [path for path in files if path.parent.name == "shards"]


def test_a_folder_has_16_files_at_most():
    folders = Counter(
        name_of(path.parent)
        for path in [*WRITTEN, *(path for name in BESIDE for path in files_of(ROOT / name))]
        if path.stem != "__init__"
    )
    assert {name: count for name, count in folders.items() if count > FULL.get(name, MAX_FILES)} == {}


# ------------------------------------------------------------------------------------------------ functions and classes


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_a_function_has_10_parameters_at_most_unless_it_is_a_command_or_a_public_constructor():
    wrong = {}
    for path in WRITTEN:
        commands = tree_of(path).body if path.parent.name == "replay_cli" else []
        for function in functions(tree_of(path)):
            arguments = function.args
            count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
            is_public = function in commands or function.name == "__init__"
            if not is_public and count > WIDE.get(function.name, MAX_PARAMETERS):
                wrong[f"{name_of(path)}: {function.name}"] = count
    assert wrong == {}


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in WRITTEN:
        yield from ((path, node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef))


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_of_the_domain_is_on_few_unrelated_classes(verb):
    bases = {node.name: {ast.unparse(base) for base in node.bases} for _, node in classes()}
    having = {node.name for _, node in classes() if any(getattr(part, "name", "") == verb for part in node.body)}
    unrelated = {name for name in having if not bases[name] & having}
    assert len(unrelated) <= TAKERS.get(verb, MAX_TAKERS), sorted(unrelated)


def test_the_name_of_a_class_is_unique():
    places = defaultdict(list)
    for path, node in classes():
        places[node.name].append(name_of(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1 and name not in TWICE} == {}


def test_functions_are_flat():
    wrong = [
        f"{name_of(path)}:{function.lineno} {function.name} is nested {depth} levels deep"
        for path in WRITTEN
        for function in functions(tree_of(path))
        if (depth := nesting(function.body)) > MAX_NESTING
    ]
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


# ------------------------------------------------------------------------------------------------ tests

PRIVATE_REACHES = 46
MEASURERS = ("tests/system/soak.py",)
"""The only files of tests that look at the memory of a process: over many minutes, for growth."""


def private_reaches(tree: ast.AST) -> list[str]:
    """The private attributes that are read of something else than the object itself."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        if node.attr.startswith("_") and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os", "sys", "ctypes"))
    ]


def test_tests_look_at_what_users_see():
    found = {name_of(path): private_reaches(tree_of(path)) for path in files_of(ROOT / "tests")}
    assert sum(map(len, found.values())) <= PRIVATE_REACHES, {name: each for name, each in found.items() if each}


def test_no_test_asserts_the_memory_of_a_process():
    for path in files_of(ROOT / "tests"):
        looks = any(isinstance(node, ast.Attribute) and node.attr == "memory_info" for node in ast.walk(tree_of(path)))
        assert not looks or name_of(path) in MEASURERS, name_of(path)


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
