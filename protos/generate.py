"""Generates the Python code of replay.proto beside it, or into another folder: `python -m protos.generate [FOLDER]`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).parent


def generate(out: Path) -> None:
    """Writes replay_pb2.py, replay_pb2_grpc.py and their stubs under `out`/replay_protos."""
    plugins = ["python", "grpc_python", "mypy", "mypy_grpc"]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}"]
        # The plugins of mypy-protobuf print a line for each file, unless `quiet`.
        + [f"--{plugin}_out={'quiet:' if plugin.startswith('mypy') else ''}{out}" for plugin in plugins]
        + [str(PROTOS / "replay_protos/replay.proto")],
        check=True,
        # protoc looks for the programs of the plugins of mypy-protobuf in PATH. They lie beside the interpreter.
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"},
    )


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS)
