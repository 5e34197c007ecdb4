"""Rules of the project itself: generated code is current, imports point one way, and nothing runs foreign code."""

import ast
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


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package):
    for path in PACKAGES[package].rglob("*.py"):
        if path.is_relative_to(ROOT / "replay_server/cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                other = name.partition(".")[0]
                if other in PACKAGES and other != package:
                    assert other in ALLOWED[package], f"{path.relative_to(ROOT)} imports {name}"


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
