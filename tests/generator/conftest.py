"""A small model and adapters of it, engines that ask servers, and time for the last words of a generator."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from replay_generator.groups import partial_groups, server
from replay_generator.testing import EOS
from tests.kit.models import make_adapter, save_model
from tests.kit.stack import Stack


@pytest.fixture(scope="module", autouse=True)
def time_for_last_words() -> Iterator[None]:
    """Gives a generator a minute for its last words: on a slow machine the server would get its permits back late."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "LAST_WORD", 60.0)
        patched.setattr(partial_groups, "LAST_WORD", 60.0)
        yield


@pytest.fixture
async def make_stack() -> AsyncIterator[Callable[..., Awaitable[Stack]]]:
    """Starts runs, which end with the test."""
    async with AsyncExitStack() as runs:

        async def make(**options: Any) -> Stack:
            return await runs.enter_async_context(Stack(**options))

        yield make


@pytest.fixture
async def stack(make_stack: Callable[..., Awaitable[Stack]]) -> Stack:
    """A run as the `make_stack` of the module starts them."""
    return await make_stack()


SETTINGS = {
    "do_sample": True,
    "temperature": 0.3,
    "top_p": 0.6,
    "top_k": 5,
    "min_p": 0.4,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 7,
    "max_new_tokens": 3,
    "eos_token_id": [EOS],
    "pad_token_id": 0,
}
"""What a model may recommend in its generation_config.json. Engines read the ids of it alone."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("models") / "model")
    (folder / "generation_config.json").write_text(json.dumps(SETTINGS))
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions; the second has another rank."""
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(model, folder / f"step-{step}", seed=step, rank=4 * step) for step in (1, 2)]


@pytest.fixture
async def make_engine(model: Path) -> AsyncIterator[Callable[..., Any]]:
    """Makes engines that ask servers; closed after the test."""
    from replay_generator.engines.vllm_server import VLLMServerEngine

    engines: list[Any] = []

    def make(*servers: Any, **options: Any) -> Any:
        urls = [server if isinstance(server, str) else server.url for server in servers]
        engines.append(VLLMServerEngine(model, base_url=urls, **({"self_test": False} | options)))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.close()
