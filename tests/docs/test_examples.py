"""The examples of README and documentation, run as they stand there."""

import re
import shlex
import subprocess
import tomllib

import pytest
import typer.main

from replay_cli.app import app
from replay_cli.run.plan import read_run
from replay_server import Config
from replay_trainer.config import GRPOConfig
from tests.docs.blocks import PAGES, ROOT, blocks, write_files

ALONE = {
    *("docs/tutorial.md", "docs/tutorial-agent.md", "docs/how-to/trl.md", "docs/how-to/frameworks.md"),
}
"""Pages with a test of their own."""
EIGHT_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
"""The machine of the pages."""


def name_of(page) -> str:
    return str(page.relative_to(ROOT))


def runnable(page) -> list:
    return [block for block in blocks(page) if block.language in ("python", "sh") and not block.skip]


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p) and name_of(p) not in ALONE], ids=name_of)
def test_the_examples_of_a_page_run_and_print_what_it_says(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    names: dict = {"__name__": "__page__"}
    try:
        for block in runnable(page):
            if block.language == "sh":
                subprocess.run(["bash", "-e", "-c", block.text], check=True, timeout=200)
            else:
                # As many lines down as in the page, so that a failure names the page's line.
                exec(compile("\n" * (block.line - 1) + block.text, name_of(page), "exec"), names)
    finally:
        for name, end in (("client", "close"), ("server", "stop")):
            getattr(names.get(name), end, lambda: None)()
    assert capsys.readouterr().out == "".join(block.text for block in blocks(page) if block.language == "text")


def test_the_configurations_in_the_pages_can_be_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()  # the tutorials make it
    loaded = 0
    for page in PAGES:
        for block in blocks(page):
            if block.language != "toml" or block.title == "generate.toml":  # that one is used by a command
                continue
            data = tomllib.loads(block.text)
            if block.title == "run.toml":
                (tmp_path / "run.toml").write_text(block.text)
                read_run(tmp_path / "run.toml", (), None, EIGHT_GPUS)
            elif "tables" in data:
                Config.model_validate(data)
            else:
                data.pop("lora", None)  # of `replay train`, which makes the adapter
                GRPOConfig(output_dir="x", **data)
            loaded += 1
    assert loaded >= 4


def commands() -> list[str]:
    """Every `replay ...` in a shell block, prompts and continuations taken away."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.language in ("sh", "shell", "console", "text"):
                text = block.text.replace("\\\n", " ")
                found += re.findall(r"^(?:\$ )?(replay [a-z-]+.*?)(?:\s+[#|].*|\s*&)?$", text, re.MULTILINE)
        found += re.findall(r"^    (replay [a-z-]+.*?)(?:\s+#.*)?$", page.read_text(), re.MULTILINE)
    return sorted({re.sub(r"\$\w+", "1", line) for line in found})


def test_every_command_in_the_pages_exists_with_its_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(ROOT / "docs/how-to/generate.md", tmp_path)  # a command reads its options from a file of this page
    (tmp_path / "train.toml").touch()
    (tmp_path / "runs").mkdir()
    group = typer.main.get_command(app)
    assert len(commands()) > 5
    for line in commands():
        context, arguments = None, shlex.split(line)
        command, name = group, arguments.pop(0)
        while True:
            context = command.make_context(name, arguments, parent=context)  # raises for an option that does not exist
            if not hasattr(command, "commands"):
                break
            arguments = [*context._protected_args, *context.args]
            if command.invoke_without_command and not arguments:
                break
            assert arguments, line
            assert arguments[0] in command.commands, line
            command, name = command.commands[arguments[0]], arguments.pop(0)
