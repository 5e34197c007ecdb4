"""The examples of README and documentation, run as they stand there."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter

import pytest
import typer.main

from replay_cli.app import app
from replay_server import Config
from replay_trainer.config import GRPOConfig
from tests.docs.blocks import PAGES, ROOT, blocks, write_files

ALONE = {
    *("docs/tutorial.md", "docs/tutorial-agent.md", "docs/how-to/trl.md", "docs/how-to/frameworks.md"),
}
"""Pages with a test of their own."""


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


def test_the_configurations_in_the_pages_can_be_loaded():
    loaded = 0
    for page in PAGES:
        for block in blocks(page):
            if block.language != "toml" or block.title == "generate.toml":  # that one is used by a command
                continue
            data = tomllib.loads(block.text)
            if "tables" in data:
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
            if block.language in ("sh", "console", "text"):
                text = block.text.replace("\\\n", " ")
                found += re.findall(r"^(?:\$ )?(replay [a-z-]+.*?)(?:\s+#.*|\s*&)?$", text, re.MULTILINE)
        found += re.findall(r"^    (replay [a-z-]+.*?)(?:\s+#.*)?$", page.read_text(), re.MULTILINE)
    return sorted({re.sub(r"\$\w+", "1", line) for line in found})


def test_every_command_in_the_pages_exists_with_its_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(ROOT / "docs/how-to/generate.md", tmp_path)  # a command reads its options from a file of this page
    (tmp_path / "train.toml").touch()
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


ANSWERS = {
    "reference/configuration": ("max_times_sampled", "samples_per_insert"),
    "reference/command-line": ("install-completion",),
    "reference/metrics": ("replay_table_evicted_unsampled_total", "replay_permits_running"),
    "reference/protocol": ("DrawRequest", "read-write"),
    "reference/client": ("update_priorities", "TableFullError"),
    "reference/trainer": ("ZeroVarianceReplacer", "clip_max", "learning rate"),
    "explanation/correction": ("importance sampling", "off-policy", "TIS"),
    "metrics": ("wandb", "tensorboard"),
    "tutorial": ("quickstart",),
    "how-to/trl": ("TRL",),
}
"""Pages, and what a reader types who looks for them."""


def found(index: dict, query: str) -> list[str]:
    """Pages by the search index, best first: as in the browser, a word in a heading counts before all others."""
    split = re.compile(index["config"]["separator"] + "|<[^>]*>").split
    scores: Counter[str] = Counter()
    for section in index["docs"]:
        title, text = split(section["title"].lower()), split(section["text"].lower())
        counts = [1000 * (word in title) / len(title) + text.count(word) / len(text) for word in split(query.lower())]
        page = section["location"].partition("#")[0].strip("/")
        scores[page] = max(scores[page], all(counts) * sum(counts))
    return [page for page, score in scores.most_common() if score]


def test_the_documentation_builds_without_a_warning_and_a_search_leads_to_the_page_that_answers(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    index = json.loads((tmp_path / "site/search/search_index.json").read_text())
    for page, queries in ANSWERS.items():
        for query in queries:
            assert page in found(index, query)[:3], query
