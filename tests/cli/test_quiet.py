"""What libraries write stands not in front of our own line: each command is a process of its own here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replay_server import ReplayServer, SecurityConfig, TableConfig
from tests.certificates import make_certificate

LOUD = """
import sys
from huggingface_hub.utils import logging
from tqdm import tqdm

logging.get_logger("huggingface_hub.utils").warning("Retrying in 1s [Retry 1/5].")
list(tqdm(range(3), desc="Loading weights"))

def score(row, text):
    return 1.0
"""


def said_by(folder: Path, *arguments: str, **environment: str) -> str:
    """What a command that fails writes on standard error."""
    paths = [str(folder), *sys.path]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    for name in ("GRPC_VERBOSITY", "HF_HUB_VERBOSITY", "TQDM_DISABLE"):
        if name not in environment:
            environ.pop(name, None)
    command = [sys.executable, "-c", "from replay_cli import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environ, timeout=120)
    assert done.returncode == 1
    return done.stderr


@pytest.fixture
def encrypted(tmp_path):
    """A server with TLS, and the certificate of an authority that did not sign its own."""
    own = make_certificate(tmp_path, "server")
    other = make_certificate(tmp_path, "other")
    security = SecurityConfig(tls_cert=own.cert, tls_key=own.key)
    with ReplayServer(tables=[TableConfig(name="pool")], port=0, security=security) as server:
        yield server.address, str(other.cert)


def test_a_certificate_that_is_not_trusted_is_one_line(tmp_path, encrypted):
    address, other = encrypted
    said = said_by(tmp_path, "--address", address, "--tls-ca", other, "--timeout", "5", "tables")
    assert said.startswith(f"replay: {address}: the server's certificate cannot be trusted")
    assert said.count("\n") == 1


def test_a_person_who_asks_grpc_gets_its_lines(tmp_path, encrypted):
    address, other = encrypted
    command = ("--address", address, "--tls-ca", other, "--timeout", "5", "tables")
    assert "Handshake failed" in said_by(tmp_path, *command, GRPC_VERBOSITY="INFO")


def test_a_port_that_is_in_use_is_one_line(tmp_path):
    with ReplayServer(tables=[TableConfig(name="pool")], port=0) as server:
        said = said_by(tmp_path, "serve", "--listen", server.address)
    assert said == f"replay: cannot listen on {server.address}: it is in use, or not an address of this machine\n"


def test_warnings_and_progress_of_the_hub_do_not_stand_before_an_error(tmp_path):
    (tmp_path / "loud.py").write_text(LOUD)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    source = ("--engine", "transformers", "--model", str(tmp_path), "--prompts", "prompts.jsonl")
    said = said_by(tmp_path, "generate", *source, "--reward", "loud:score")
    assert said.startswith(f"replay: {tmp_path} cannot be loaded: ")
    assert said.count("\n") == 1
