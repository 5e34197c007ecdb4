"""The trainer on a real server: a share of replay, and groups that cannot be trained on."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.demo.task import make_tokenizer
from replay_client import AsyncReplayClient, ReplayClient
from replay_client.access import ListenAddress
from replay_client.errors import DeadlineExceededError
from replay_client.records import read_described
from replay_client.scoring import group_priority
from replay_client.testing import PATIENCE, make_group, until
from replay_generator import GeneratorConfig, GeneratorStats, RolloutGenerator
from replay_generator.engines import SamplingConfig
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.policy.remote import WeightsServer
from replay_generator.testing import ScriptedEngine
from replay_server import ReplayServer, TableConfig
from replay_server.config import Config
from replay_trainer import TableEvaluation
from replay_trainer.weights import published
from tests.docs.blocks import ROOT, write_files
from tests.kit.generators import make_prompts
from tests.kit.models import make_model
from tests.kit.processes import free_port, run_replay
from tests.kit.trainers import lines_of, make_trainer

STEPS, FRESH = 6, 2
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.fixture
def client() -> Iterator[ReplayClient]:
    tables = [
        TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 64}, forward_to="replay"),
        TableConfig(name="replay", sampler="prioritized", remover="min_heap", max_size=64, max_times_sampled=3),
    ]
    admission = {"fresh_groups_per_step": FRESH, "max_staleness": 20}
    with ReplayServer(tables, 0, admission=admission) as server, ReplayClient(server.address) as connected:
        yield connected


def insert(client: ReplayClient, count: int, bad: dict[int, bytes]) -> list[int]:
    """`count` groups for the queue, the payloads of `bad` among them at their places; returns all keys."""
    keys = []
    for index in range(count):
        group = make_group(rewards=[1.0, 0.0], completions=[[5, 6], [7 + index % 5]], logprobs=-2.7)
        payload = bad.get(index, group.encode())
        priority = group_priority(group.rewards, group.advantages)
        keys.append(client.insert(payload, {"rollouts": priority}))
    return keys


def train(client: ReplayClient, output_dir: Path, **options: Any) -> list[dict[str, Any]]:
    """The metrics of each step."""
    make_trainer(client, output_dir, **({"max_steps": STEPS, "sample_timeout": PATIENCE} | options)).train()
    return lines_of(output_dir)


def test_a_share_comes_from_a_real_pool_and_permits_count_fresh_groups(client, tmp_path):
    insert(client, STEPS * FRESH + FRESH, {})
    steps = train(client, tmp_path, groups_per_step=2 * FRESH, replay_share=0.5, replay_start_step=1)
    assert [line["fresh/groups"] for line in steps] == [FRESH] * STEPS
    assert [line["replay/groups_added"] for line in steps] == [0] + [FRESH] * (STEPS - 1)
    assert max(line["replay/times_sampled_mean"] or 0 for line in steps) <= 3
    assert client.policy().version == STEPS


def test_bad_groups_leave_a_real_server_and_are_never_drawn_again(client, tmp_path):
    beyond = make_group(rewards=[1.0, 0.0], completions=[[5, 900], [7]], logprobs=-2.7)
    broken = make_group(rewards=[1.0, 0.0])
    broken.advantages = np.array([math.nan, 0.0], np.float32)
    keys = insert(client, STEPS * FRESH + FRESH, {0: b"foreign", 3: beyond.encode(), 4: broken.encode()})
    bad = {keys[0], keys[3], keys[4]}
    steps = train(client, tmp_path, groups_per_step=2 * FRESH, replay_share=0.5)
    assert sum(line["train/groups_unusable"] for line in steps) == 3
    assert sum(line["train/groups"] for line in steps) > STEPS * FRESH
    record = lines_of(tmp_path, "steps.jsonl")
    assert {group["key"] for step in record for group in step["unusable"]} == bad
    trained = [group for step in record for group in step["trained"]]
    fresh = {group["key"] for group in trained if group["source"] == "fresh"}
    fresh |= {group["key"] for step in record for group in step["left_out"]}
    assert fresh | bad == set(keys[: STEPS * FRESH])
    for table in ("rollouts", "replay"):
        assert not bad & {item.key for item in client.list_items(table, limit=100)}
    assert client.get(sorted(bad)) == []


def test_a_trainer_says_that_it_ends_after_its_last_step_and_not_when_it_fails(client, tmp_path):
    def ended() -> list[tuple[str, bool]]:
        return [(each.role, each.ended) for each in client.server_info().clients if "trainer" in each.role]

    insert(client, STEPS * FRESH, {})
    with pytest.raises(DeadlineExceededError):
        train(client, tmp_path, groups_per_step=FRESH, max_steps=STEPS + 1, sample_timeout=1.0)
    assert ended() == [("generator, trainer", False)]
    insert(client, 1 * FRESH, {})
    train(client, tmp_path, groups_per_step=FRESH, max_steps=STEPS + 1, resume=True)
    assert ended() == [("generator, trainer", True)]


def test_a_trainer_that_is_interrupted_says_that_it_ends(client, tmp_path):
    def ctrl_c(_: dict[str, float]) -> None:
        raise KeyboardInterrupt

    insert(client, FRESH, {})
    with pytest.raises(KeyboardInterrupt):
        train(client, tmp_path, groups_per_step=FRESH, on_step=ctrl_c)
    assert [each.ended for each in client.server_info().clients if "trainer" in each.role] == [True]


class Generators:
    """Generators on an event loop of their own, in a thread, until the end of the block."""

    def __init__(self, address: str, *configs: GeneratorConfig, **engine: Any) -> None:
        self._address, self._engine = address, engine
        self._configs = configs
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="generators")

    async def _run(self) -> None:
        self._loop, self._running = asyncio.get_running_loop(), []
        tasks = []
        async with AsyncReplayClient(self._address, name="gen") as client:
            for config in self._configs:
                scores = iter(range(10**9))
                prompts = make_prompts(10_000 if config.max_groups is None else config.max_groups)
                reward = partial(lambda row, text, scores: float(next(scores) % 2), scores=scores)
                engine = self._engine.get("engine") or ScriptedEngine(**self._engine)
                generator = RolloutGenerator(client, engine, prompts, reward, config)
                self._running.append(generator)
                tasks.append(asyncio.create_task(generator.run()))
            await asyncio.gather(*tasks)

    def __enter__(self) -> Generators:
        self._thread.start()
        return self

    @property
    def stats(self) -> GeneratorStats:
        """Of the first one."""
        return self._running[0].stats

    def __exit__(self, *_: object) -> None:
        for generator in self._running:
            self._loop.call_soon_threadsafe(generator.stop)
        self._thread.join()


def exchanged() -> Any:
    tokenizer = make_tokenizer()
    ids = tokenizer.get_vocab()
    tokenizer.backend_tokenizer.model = models.WordLevel(ids | {"+": ids["="], "=": ids["+"]}, tokenizer.unk_token)
    return tokenizer


def with_padding() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<another pad>"})
    return tokenizer


@pytest.mark.parametrize(
    ("model", "tokenizer", "words"),
    [
        (
            lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
            make_tokenizer,
            r"\(model_type llama, vocabulary 64, .* trainer \(model_type qwen2, vocab",
        ),
        (lambda: make_model(vocabulary=33), make_tokenizer, r"vocabulary 33, .* trainer \(.*vocabulary 64"),
        (lambda: make_model(vocabulary=64), exchanged, r"tokenizer [0-9a-f]{16}\) than"),
        (lambda: make_model(vocabulary=64), with_padding, ""),
        (None, make_tokenizer, ""),
    ],
    ids=["another type", "another vocabulary", "another tokenizer", "a token for padding", "a model of its own"],
)
def test_a_generator_of_another_model_ends_the_run_at_its_first_step_by_both_names(
    client, tmp_path, model, tokenizer, words
):
    folder = None if model is None else str(tmp_path / "model")
    if model is not None:
        model().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    config = GeneratorConfig(tables=("rollouts",), group_size=3, follow_policy=False, stop_grace=0.2)
    engine = {} if folder is None else {"model": folder, "tokenizer": AutoTokenizer.from_pretrained(folder)}
    own = {"model": make_model(vocabulary=64), "tokenizer": make_tokenizer()}
    trainer = make_trainer(client, tmp_path / "run", groups_per_step=FRESH, max_steps=1, **own)
    with Generators(client.address, config, **engine):
        until(lambda: client.list_items("rollouts"))  # with its own weights, which a trainer replaces
        with pytest.raises(RuntimeError, match=f"generator gen has another .*{words}") if words else nullcontext():
            trainer.train()
        said = {each.name: read_described(each.settings) for each in client.server_info().clients}
    assert (tmp_path / "run/metrics.jsonl").exists() is not bool(words)
    assert [said[name]["model"].get("model_type") for name in said if said[name].get("part") == "trainer"] == ["qwen2"]


def test_evaluation_from_a_table_takes_no_permits_out_of_trainings_budget(tmp_path):
    write_files(ROOT / "docs/how-to/train.md", tmp_path)
    config = Config.load(tmp_path / "evaluation.toml")
    assert config.admission is not None
    server = ReplayServer(tables=config.tables, port=0, admission=config.admission)
    few = {"group_size": 3, "follow_policy": False, "stop_grace": 0.2}
    trained = GeneratorConfig(tables=("rollouts",), **few)
    evaluated = GeneratorConfig(tables=("eval",), max_groups=150, **few)
    with server, ReplayClient(server.address) as client, Generators(server.address, evaluated, trained):
        steps = train(
            client,
            tmp_path / "run",
            model=make_model(vocabulary=128),
            evaluate=TableEvaluation(client),
            groups_per_step=config.admission.fresh_groups_per_step,
            eval_every=1,
        )
        admission = client.server_info().admission
    assert [line["fresh/groups"] for line in steps] == [config.admission.fresh_groups_per_step] * STEPS
    assert sum(line.get("eval/groups") or 0 for line in steps) > 0
    bound = (config.admission.max_staleness + STEPS + 1) * config.admission.fresh_groups_per_step
    assert STEPS * config.admission.fresh_groups_per_step <= admission.accepted + admission.running <= bound


def test_a_generator_without_the_trainers_disk_follows_it_by_deltas(client, tmp_path):
    base, served, cache, port = tmp_path / "model", tmp_path / "served", tmp_path / "cache", free_port()
    (tokenizer := make_tokenizer()).save_pretrained(base)
    (model := make_model(vocabulary=len(tokenizer))).save_pretrained(base)
    config = GeneratorConfig(
        tables=("rollouts",),
        group_size=2,
        sampling=SamplingConfig(max_tokens=4),
        wait_for_policy=True,
        weights_cache=cache,
        weights_root=f"http://127.0.0.1:{port}",
        probe_tolerance=0.05,  # of a model that is so small
        stop_grace=0.2,
    )
    far = {"publish": "delta", "weights_dir": served, "weights_url": config.weights_root}
    few = {"groups_per_step": FRESH, "learning_rate": 1e-5}
    trainer = make_trainer(client, tmp_path / "run", model=model, tokenizer=tokenizer, **few, **far)
    with (
        WeightsServer(served, ListenAddress("weights", f"127.0.0.1:{port}")) as server,
        Generators(client.address, config, engine=TransformersEngine(base, seed=0)) as generators,
    ):
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        trainer.train()
        until(lambda: generators.stats["policy_version"] == 3)
        fetched = generators.stats["fetched_bytes"]
        server.shutdown()
    assert [line["fresh/groups"] for line in lines_of(tmp_path / "run")] == [FRESH] * 3
    newest, files = cache / "replay-weights/0/step-3", [*(served / "step-3").glob("*.*")]
    assert {file.name: file.read_bytes() for file in newest.iterdir()} == {
        each.name: each.read_bytes() for each in files
    }
    whole = sum(file.stat().st_size for file in files)
    assert whole < fetched < 2 * whole  # of four versions


def test_replay_train_holds_bfloat16_models_in_float32_so_that_small_steps_count(tmp_path, client):
    model = make_model(vocabulary=len(make_tokenizer())).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    for _ in range(FRESH):
        client.insert(make_group(rewards=[1.0, 0.0]), {"rollouts": 1.0})
    options = ["--learning-rate", "1e-6", "--groups-per-step", str(FRESH), "--max-steps", "1", "--quiet"]
    folders = ["--model", str(tmp_path / "base"), "--output-dir", str(tmp_path / "run")]
    done = run_replay("train", *folders, *options, address=client.address)
    assert done.returncode == 0, done.stderr
    trained = AutoModelForCausalLM.from_pretrained(published(tmp_path / "run")[-1])
    assert trained.dtype == torch.float32
    weights = zip(trained.parameters(), model.parameters(), strict=True)
    moved = [(after - before.float()).abs().max().item() for after, before in weights]
    assert 0 < max(moved) < 1e-5
