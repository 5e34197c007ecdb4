"""Generates the Python code of replay.proto, with `python -m protos.generate [FOLDER]`.

The code is written beside replay.proto. If FOLDER is given, it is written to FOLDER/replay_protos instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).parent


def generate(out: Path) -> None:
    """Writes replay_pb2.py, replay_pb2_grpc.py and their stubs under `out`/replay_protos."""
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}"]
    outputs = [f"--python_out={out}", f"--grpc_python_out={out}"]
    # Without `quiet`, the plugins of mypy-protobuf print a line for each file.
    outputs += [f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}"]
    source = str(PROTOS / "replay_protos/replay.proto")
    # protoc looks in PATH for the plugins of mypy-protobuf, which are programs in the folder of the interpreter.
    programs = Path(sys.executable).parent
    path = f"{programs}:{os.environ.get('PATH', '')}"
    subprocess.run([*protoc, *outputs, source], check=True, env=os.environ | {"PATH": path})


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS)
