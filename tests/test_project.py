"""Rules of the project itself: generated code is current, and imports point one way."""

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
        if path == ROOT / "replay_server/cli.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                other = name.partition(".")[0]
                if other in PACKAGES and other != package:
                    assert other in ALLOWED[package], f"{path.relative_to(ROOT)} imports {name}"
