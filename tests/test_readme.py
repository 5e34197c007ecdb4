"""The examples of the README, run as they stand there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_examples_of_the_readme_run_one_after_the_other(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    names: dict = {}
    try:
        for block in blocks:
            exec(block, names)
        assert capsys.readouterr().out == "[1. 0.] 0 1\n"
        assert callable(names["train"])
    finally:
        names["client"].close()
        names["server"].stop()
