"""The site, as `make docs` builds it: without a warning, found by the words that people type, and copied as typed."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.conftest import browser
from tests.docs.blocks import PAGES, ROOT, blocks

__all__ = ["browser"]

NODE = shutil.which("node")
WORDS = re.search(r"^docs:.*\n\t\$\(BIN\)/python (-m mkdocs .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
"""What `make docs` says to Python."""


def build(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    assert WORDS is not None
    command = [sys.executable, *WORDS[1].split(), "--config-file", str(config), "--site-dir", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of the site, and what its build said."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    return folder, build(ROOT / "mkdocs.yml", folder)


@pytest.fixture(scope="module")
def site(built) -> Path:
    folder, done = built
    if done.returncode:
        pytest.skip("the site is not built: another test says why")
    return folder


# ------------------------------------------------------------------------------------------------ warnings


def test_the_documentation_builds_without_a_warning(built):
    _, done = built
    assert "WARNING -" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


PLANTED = {
    "": "",
    "[a page that is not there](nowhere.md)": "contains a link 'nowhere.md'",
    "[an anchor that another page lacks](other.md#gone)": "does not contain an anchor '#gone'",
    "[an anchor that this page lacks](#gone)": "there is no such anchor on this page",
    "[an address that is no page](/other)": "contains an absolute link '/other'",
    "![a picture that is not there](gone.png)": "contains a link 'gone.png'",
}
"""What is written into a page, and what the build says about it."""


@pytest.mark.parametrize("planted", PLANTED)
def test_the_build_fails_at_a_planted_mistake(planted, tmp_path):
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text(f"# One\n\n[Two](other.md#two). {planted}\n")
    (pages / "other.md").write_text("# Other\n\n## Two\n")
    own = {"docs_dir": "docs", "hooks": [], "plugins": [], "extra_css": [], "nav": ["index.md", "other.md"]}
    config = tmp_path / "mkdocs.yml"
    config.write_text(json.dumps({"INHERIT": str(ROOT / "mkdocs.yml"), **own}))
    done = build(config, tmp_path / "site")
    assert PLANTED[planted] in done.stderr
    assert (done.returncode != 0) == bool(planted), done.stderr


@pytest.mark.parametrize("option", ['test="skip"', "linenos", 'titel="x"'])
def test_a_fence_that_mkdocs_would_not_take_for_one_is_refused(option, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"```python {option}\n1\n```\n")
    with pytest.raises(AssertionError, match="a fence has a title and nothing else"):
        blocks(page)


# ------------------------------------------------------------------------------------------------ what is copied


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_only_a_block_that_shows_what_a_command_prints_has_prompts(page):
    for block in blocks(page):
        lines = block.text.replace("\\\n", "").splitlines()
        prompts = [line for line in lines if line.startswith("$ ")]
        if block.language == "console":
            assert 0 < len(prompts) < len(lines), f"line {block.line}: commands alone are `shell`, without prompts"
        else:
            assert prompts == [], f"line {block.line}"


@pytest.fixture
def address(site):
    """Where a browser finds the site."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.mark.parametrize("page", ["how-to/export", "how-to/look"])
def test_the_button_copies_what_a_reader_types(page, address, browser):
    wanted = []
    for block in blocks(ROOT / f"docs/{page}.md"):
        lines = block.text.rstrip("\n").splitlines()
        if block.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        wanted.append("\n".join(lines))
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    tab.goto(f"{address}/{page}/")
    buttons = tab.locator(".highlight button[data-clipboard-target]")
    buttons.first.wait_for()
    copied = []
    for number in range(buttons.count()):
        tab.evaluate("navigator.clipboard.writeText('')")
        # The note that something was copied lies over the lower end of the window.
        buttons.nth(number).evaluate("button => button.scrollIntoView({block: 'center'})")
        buttons.nth(number).click(force=True)
        tab.wait_for_function("async () => await navigator.clipboard.readText() !== ''")
        copied.append(tab.evaluate("navigator.clipboard.readText()"))
    context.close()
    assert copied == wanted


# ------------------------------------------------------------------------------------------------ search

ANSWERS = {
    "": ("install",),
    "how-to/troubleshoot": (
        *(
            "out of memory",
            "OOM",
            "CUDA",
            "CUDA out of memory",
            "no space left",
            "No space left on device",
            "disk full",
        ),
        *("stuck", "hang", "hangs", "freeze", "slow", "timeout", "times out", "NaN", "loss spikes", "port in use"),
        *("connection refused", "cannot connect", "reward does not rise", "reward not improving"),
    ),
    "reference/client": ("API", "python API", "update_priorities", "TableFullError"),
    "how-to/run": ("multi node", "multi-node", "several nodes", "slurm", "multi gpu", "config file"),
    "how-to/deploy": ("kubernetes", "docker", "helm"),
    "how-to/data": ("dataset format", "dataset", "jsonl", "parquet"),
    "how-to/generate": ("vLLM version", "vllm"),
    "how-to/train": ("resume", "torchrun"),
    "how-to/secure": ("token mismatch", "401", "permission denied", "TLS"),
    "how-to/outage": ("crash", "killed"),
    "how-to/tune": ("backpressure", "throughput", "staleness", "lag"),
    "how-to/back-up": ("upgrade", "checkpoint"),
    "how-to/own-model": ("huggingface",),
    "how-to/any-agent": ("OpenAI", "Claude"),
    "how-to/lora": ("LoRA",),
    "how-to/trl": ("TRL",),
    "how-to/another-language": ("javascript", "nodejs", "another language"),
    "explanation/correction": ("importance sampling", "off-policy", "TIS", "logprobs mismatch"),
    "metrics": ("wandb", "tensorboard", "entropy collapse", "learning rate"),
    "performance": ("performance", "benchmark"),
    "tutorial": ("quickstart",),
    "reference/configuration": ("max_times_sampled", "samples_per_insert"),
    "reference/command-line": ("exit status",),
    "reference/metrics": ("replay_table_evicted_unsampled_total", "replay_permits_running"),
    "reference/protocol": ("DrawRequest",),
    "reference/trainer": ("ZeroVarianceReplacer", "clip_max", "learning_rate"),
}
"""Pages, and what a reader types who looks for them."""
FIRST = 3
"""Results that a reader looks at."""


@pytest.mark.skipif(NODE is None, reason="needs node, which runs the search of the theme")
def test_a_search_leads_to_the_page_that_answers(site):
    assert NODE is not None
    queries = [query for words in ANSWERS.values() for query in words]
    command = [NODE, str(ROOT / "tests/docs/search.cjs"), str(site), *queries]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    assert len(queries) > 60
    for page, words in ANSWERS.items():
        for query in words:
            assert page in found[query][:FIRST], (query, found[query][:FIRST])
