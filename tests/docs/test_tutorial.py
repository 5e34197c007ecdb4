"""The tutorial as its reader runs it: every block, in order, with the run in a terminal of its own."""

from __future__ import annotations

import json
import runpy

import pytest
import torch

from replay_cli.run.run_file import read_run_file
from tests.docs.blocks import ROOT, write_files
from tests.docs.reader import Reader

PAGE = ROOT / "docs/tutorial.md"
SHORTER = {"SOLVED = 0.4": "SOLVED = 0.05"}
"""What the test does less of than the reader."""


@pytest.mark.long
def test_the_tutorial_runs_from_its_first_block_to_its_last(tmp_path):
    with Reader(PAGE, tmp_path, "tutorial", SHORTER) as reader:
        reader.read()
    said = reader.said
    for words in (
        '{"prompt": ',
        "rollouts",
        "completion 7",
        "fresh reward ",
        "reward 0.",
        "58+7 =",
        "weights             ",
    ):
        assert words in said
    steps = [line["step"] for line in reader.metrics()]
    assert steps == list(range(1, len(steps) + 1))
    assert f"\n{len(steps)} steps\n" in said  # the run that was continued
    assert "failure" not in said
    assert not any(line.startswith("warning") and " permits: " not in line for line in said.splitlines())


@pytest.mark.parametrize("page", ["tutorial.md", "tutorial-agent.md"])
def test_the_program_of_a_tutorial_makes_what_its_run_file_names(page, tmp_path, monkeypatch):
    """Without the supervised training, which takes a minute."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    write_files(ROOT / "docs" / page, tmp_path)
    program = tmp_path / "make_model.py"
    program.write_text(program.read_text().replace("while solved < SOLVED:", "while False:"))
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(program))
    finally:
        torch.set_num_threads(threads)
    run = read_run_file(tmp_path / "run.toml")
    row = json.loads((tmp_path / run.generate["prompts"]).read_text().splitlines()[0])
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    model = AutoModelForCausalLM.from_pretrained(run.model)
    text = row["prompt"] + row["answer"] + tokenizer.eos_token
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < model.config.vocab_size
    assert ids[-1] == model.config.eos_token_id
