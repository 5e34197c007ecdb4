"""`make test-pythons` finds the interpreters of a machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pythons

THIS = f"{sys.version_info[0]}.{sys.version_info[1]}"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without interpreters, but for those that a test puts into its folder."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "uv"))
    return tmp_path


def test_the_supported_versions_are_those_of_the_classifiers():
    assert pythons.supported() == ["3.11", "3.12", "3.13"]


@pytest.mark.parametrize(
    "place", ["bin/python3.12", "pyenv/versions/3.12.1/bin/python3.12", "uv/cpython-3.12.9-linux/bin/python3.12"]
)
def test_an_interpreter_is_found_on_the_path_and_where_pyenv_and_uv_put_it(machine, place):
    path = program(machine / place, "echo 3.12")
    assert pythons.find("3.12") == path


def test_a_program_of_pyenv_that_does_not_start_is_passed_over(machine):
    program(machine / "bin/python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    path = program(machine / "pyenv/versions/3.13.0/bin/python3.13", "echo 3.13")
    assert pythons.find("3.13") == path


def test_a_program_of_another_version_is_passed_over(machine):
    program(machine / "bin/python3.13", "echo 3.12")
    assert pythons.find("3.13") is None


def test_without_arguments_missing_versions_are_named_and_the_others_are_printed(machine, capsys):
    path = program(machine / "bin/python3.12", "echo 3.12")
    pythons.main([])
    printed = capsys.readouterr()
    assert printed.out == f"{path}\n"
    assert "no Python 3.11 is on this machine" in printed.err
    assert "no Python 3.13 is on this machine" in printed.err


def test_a_version_that_was_asked_for_and_is_missing_fails(machine):
    with pytest.raises(SystemExit) as caught:
        pythons.main(["3.13"])
    assert caught.value.code == 1


def test_the_running_interpreter_can_make_an_environment():
    done = subprocess.run([sys.executable, "-c", pythons.CHECK], capture_output=True, text=True, env={**os.environ})
    assert done.stdout.strip() == THIS
