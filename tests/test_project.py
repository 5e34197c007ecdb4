"""Rules of the project itself that protect its users or a direction.

Generated code is current, packages use only public names of each other, no code comes from data. Which way imports
point is in pyproject.toml, for import-linter; what ruff has a rule for is there too. `make lint` runs both.
"""

import ast
import subprocess
import sys
from functools import cache

import pytest

from protos.generate import generate
from tests.packages import PACKAGES


@cache
def modules_of(package: str) -> dict[str, ast.Module]:
    """The modules of a package that a person wrote, by their dotted names."""
    root = PACKAGES[package]
    found = {}
    for path in sorted(root.rglob("*.py")):
        if "_pb2" not in path.name:
            name = ".".join((package, *path.relative_to(root).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


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
        *("access", "advantages", "columns", "errors", "folder_lock", "records", "rollout", "run_metrics"),
        *("sampling_masks", "scoring", "settings", "supervisor", "testing", "tracing", "trend", "waits", "words"),
    },
    "replay_generator": {
        *(
            "config",
            "engines",
            "engines.model_checks",
            "engines.rotary_frequencies",
            "engines.weights",
            "policy.remote",
        ),
        *("prompts.files", "prompts.prompt", "prompts.stored", "rewards.functions", "rollouts.environments"),
        *("rollouts.rollout", "rollouts.sessions", "testing", "user_code.calls"),
    },
    "replay_dashboard": {"app", "diagnosis", "group", "health", "tag_counts", "training", "turns", "units"},
    "replay_trainer": {"config", "correction", "leases", "metrics", "resume", "suppliers", "weights"},
    "replay_cli": set(),
    "replay_adapters": set(),
}
"""The modules of a package that others may import, beside the package itself."""


def imports_across(package: str) -> set[tuple[str, str]]:
    """The modules of other packages that a package imports, each with the name that it takes from there, if any."""
    found = set()
    for tree in modules_of(package).values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                if node.module.partition(".")[0] not in PACKAGES:
                    continue
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    is_module = inner in modules_of(inner.partition(".")[0])
                    found.add((inner, "") if is_module else (node.module, alias.name))
    others = PACKAGES.keys() - {package}
    return {(module, name) for module, name in found if module.partition(".")[0] in others}


def names_of(module: str) -> set[str]:
    """The names that a module gives to others: those in its `__all__`; without one, those that it defines."""
    defined: set[str] = set()
    for node in modules_of(module.partition(".")[0])[module].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            if "__all__" in names and node.value is not None:
                return set(ast.literal_eval(node.value))
            defined |= names
    return {name for name in defined if not name.startswith("_")}


@pytest.mark.parametrize("package", PACKAGES)
def test_other_packages_import_only_public_names(package):
    private = set()
    for module, name in imports_across(package):
        root, _, inside = module.partition(".")
        if "_pb2" in module + name:
            continue
        if inside not in PUBLIC[root] | {""}:
            private.add(module)
        elif name not in PUBLIC[root] | {""} | names_of(module):
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
    for name, tree in modules_of(package).items():
        assert unsafe(tree) == [], name


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
