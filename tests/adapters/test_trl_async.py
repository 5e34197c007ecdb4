"""ServerRollouts in TRL's real AsyncGRPOTrainer, which trains on a CPU here, with real servers and generators."""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="pip install '.[trl]'")

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from examples.demo.task import make_tokenizer
from replay_adapters.trl_async import ServerRollouts, last_checkpoint
from replay_client import ReplayClient
from replay_client.errors import TableNotFoundError
from replay_client.folder_lock import FolderLock
from replay_client.scoring import group_priority
from replay_client.testing import make_group
from replay_generator.engines.weights import model_facts
from replay_trainer.weights import published
from tests.adapters.async_grpo_on_cpu import OPTIONS
from tests.adapters.killed_async_grpo import block, insert, note_steps, save_model, train, trained
from tests.kit.groups import in_pieces
from tests.kit.models import make_model
from tests.kit.processes import ServerProcess, free_port, server_process

pytestmark = pytest.mark.timeout(900)  # a guard against hanging; processes start where others may be busy
BUDGET = 26
"""Tokens of a row: five completions of `insert`, which are a group and the first one of the next."""
WEIGHTS = Path("runs/async/weights")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and its folder's parent as the current directory."""
    monkeypatch.chdir(tmp_path)
    return save_model(tmp_path / "model")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with server_process(tmp_path, block("replay.toml")) as server:
        yield server


@pytest.fixture
def before_step() -> Iterator[dict[int, Callable[[], None]]]:
    """What to do in the middle of training, by the number of steps made before. trained.jsonl has the steps."""
    actions: dict[int, Callable[[], None]] = {}
    end = note_steps(Path("trained.jsonl"), lambda made: actions.pop(made, lambda: None)())
    yield actions
    end()


def made(model: Path, rollouts: ServerRollouts, peft_config: Any = None, **options: Any) -> AsyncGRPOTrainer:
    """A trainer that has not begun."""
    arguments: dict[str, Any] = OPTIONS | {"output_dir": "runs/async", "token_budget": BUDGET} | options
    return AsyncGRPOTrainer(
        model=str(model),
        args=AsyncGRPOConfig(**arguments),
        train_dataset=Dataset.from_list([{"prompt": "1+1="}]),
        processing_class=make_tokenizer(),
        rollout_worker=rollouts,
        weight_transfer=rollouts,
        callbacks=[rollouts],
        peft_config=peft_config,
    )


def begun(address: str, model: Path, rollouts: ServerRollouts | None = None, **options: Any) -> AsyncGRPOTrainer:
    """A trainer whose worker has begun, and that takes no step by itself."""
    rollouts = rollouts or ServerRollouts(address, WEIGHTS, max_staleness=3)
    trainer = made(model, rollouts, **options)
    rollouts.on_train_begin(
        trainer.args,
        trainer.state,
        trainer.control,
        model=trainer.model,
        processing_class=trainer.processing_class,
        train_dataloader=trainer.get_train_dataloader(),
    )
    return trainer


def rows_of(trainer: AsyncGRPOTrainer, count: int) -> list[dict[str, Any]]:
    """The next samples that TRL reads from its queue."""
    return list(islice(iter(trainer._rollout_dataset), count))


def put(address: str, *groups: Any) -> None:
    with ReplayClient(address) as client:
        for group in groups:
            client.insert(group, {"rollouts": group_priority(group.rewards, group.advantages)})


def history(step: int) -> list[dict[str, float]]:
    state = json.loads(Path(f"runs/async/checkpoint-{step}/trainer_state.json").read_text())
    logged: list[dict[str, float]] = state["log_history"]
    return logged


# ------------------------------------------------------------------------------------------------- the page's code


@pytest.mark.long
def test_the_code_of_the_page_trains_with_a_generator_that_follows_its_weights(tmp_path, server, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer()
    make_model(vocabulary=len(tokenizer)).save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(9)))
    root = Path(__file__).parent.parent.parent
    command = "generate --model model --prompts prompts.jsonl --reward tests.rewards:even_start"
    options = "--wait-for-policy --engine transformers --group-size 4 --max-tokens 4 --max-concurrent-groups 2"
    with Path("generate.log").open("w") as log:
        generator = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "replay_cli",
                "--address",
                server.address,
                *command.removeprefix("replay ").split(),
                *options.split(),
            ],
            stdout=log,
            stderr=log,
            env={"PYTHONPATH": str(root), "PATH": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
    try:
        train(Path("model"), server.address, max_steps=8, token_budget=60)
        assert generator.poll() is None, Path("generate.log").read_text()
    finally:
        generator.kill()
        generator.wait()
    assert [line["step"] for line in history(8) if "ratio" in line] == list(range(1, 9))
    for line in history(8)[:-1]:
        # The sampler's log-probabilities are those of these weights, or of weights that are a few steps older.
        assert 0.5 < line["ratio"] < 2.0, line
        assert 0 <= line["sample/staleness_mean"] <= 16
    with ReplayClient(server.address) as client:
        policy = client.policy()
        assert policy.version == 9
        assert policy.weights == str((tmp_path / WEIGHTS / "step-9").resolve())
        # On a busy machine, the groups of later versions still wait in `rollouts` when the trainer ends.
        newest = []
        for table in ("rollouts", "replay"):
            page = client.list_items(table, limit=1, order_by="policy_version", descending=True)
            newest += [item.policy_version for item in page.items]
        assert max(newest) > 1, "the generator loaded no version that was trained"
    loaded = AutoModelForCausalLM.from_pretrained(policy.weights)
    for name, weight in AutoModelForCausalLM.from_pretrained("runs/async/checkpoint-8").named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), weight)


def test_a_trainer_that_starts_again_goes_on_from_the_version_that_it_left(model, server, tmp_path):
    insert(server.address, 12)
    with ReplayClient(server.address) as client:
        for expected in (3, 6):
            train(model, server.address, max_steps=2, token_budget=BUDGET, save_strategy="no")
            policy = client.policy()
            assert policy.version == expected
            assert Path(policy.weights).name == f"step-{expected}"
            assert [path.name for path in published(WEIGHTS)] == [f"step-{expected - 1}", f"step-{expected}"]
            told = json.loads((Path(policy.weights) / "manifest.json").read_text())["model"]
            assert told == model_facts(str(model), AutoTokenizer.from_pretrained(model))
    # The server is another one, and the folder is the same.
    with server_process(tmp_path, block("replay.toml")) as fresh, ReplayClient(fresh.address) as client:
        insert(fresh.address, 4)
        train(model, fresh.address, max_steps=1, token_budget=BUDGET, save_strategy="no")
        assert client.policy().weights == str(published(WEIGHTS)[-1])
        assert client.policy().version == 8


@pytest.mark.parametrize(("lost", "restored"), [([6], 2), ([4, 6], 5), ([], 0)])
def test_an_older_checkpoint_gets_the_groups_of_the_later_ones_again(model, tmp_path, before_step, lost, restored):
    config = block("replay.toml").replace("forward_to", "retain_consumed = 3\nforward_to")
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        insert(server.address, 12)
        options = {"max_steps": 6, "save_steps": 2, "token_budget": BUDGET}
        train(model, server.address, **options)
        before = client.policy().version
        for step in lost:
            Path(f"runs/async/checkpoint-{step}").rename(f"later-{step}")
        train(model, server.address, **options | {"max_steps": 8})
        # Each completion is in one step of the new history, which begins at the checkpoint that is left.
        assert trained(tmp_path) == list(range(8 * 5))
        table = client.server_info().tables["rollouts"]
        assert table.size == 2
        assert table.reserved == 0
        assert table.restored == restored
        assert client.policy().version > before


def test_a_checkpoint_that_the_server_does_not_know_is_gone_on_from_with_a_warning(
    model, tmp_path, before_step, caplog
):
    config = block("replay.toml").replace("forward_to", "retain_consumed = 1\nforward_to")
    with server_process(tmp_path, config) as server:
        insert(server.address, 12)
        options = {"save_steps": 1, "token_budget": BUDGET}
        train(model, server.address, max_steps=3, **options)
        for step in (2, 3):
            Path(f"runs/async/checkpoint-{step}").rename(f"later-{step}")
        with caplog.at_level(logging.WARNING):
            train(model, server.address, max_steps=3, **options)
        assert (
            "groups that were consumed after runs/async/checkpoint-1 do not come back: there is no state" in caplog.text
        )
        # What the first run had not consumed: the rest of the group that checkpoint-1 has a part of is gone, too.
        assert trained(tmp_path)[:5] == list(range(5))
        assert trained(tmp_path)[5:] == list(range(12, 22))


def test_groups_of_a_run_before_are_behind_and_not_ahead(model, server):
    with ReplayClient(server.address) as client:
        client.set_policy_version(40)
        put(server.address, *(make_group(version=version, logprobs=-6.0) for version in (38, 40)))
        trainer = begun(server.address, model)
        trainer._sync_weight()
        assert trainer.model_version == 1
        assert client.policy().version == 41
        rows_of(trainer, 6)
        assert trainer._metrics["train"]["sample/staleness_max"] == [3.0] * 3 + [1.0] * 3
        trainer.rollout_worker.stop()


def test_an_adapter_is_published_merged(model, server):
    peft = pytest.importorskip("peft", reason="pip install '.[lora]'")
    insert(server.address, 6)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = made(model, ServerRollouts(server.address, WEIGHTS), peft_config=adapter, max_steps=2)
    trainer.train()
    loaded = AutoModelForCausalLM.from_pretrained(published(WEIGHTS)[-1])
    merged = trainer.model.merge_and_unload()
    for name, weight in loaded.named_parameters():
        torch.testing.assert_close(weight, merged.get_parameter(name))


def test_an_adapter_that_no_merged_weight_can_hold_is_refused(model, server):
    peft = pytest.importorskip("peft", reason="pip install '.[lora]'")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(model / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"])
    trainer = made(model, ServerRollouts(server.address, WEIGHTS), peft_config=adapter)
    with pytest.raises(
        ValueError, match=r"TRL adds the adapter .* share one weight, .* changes model\.embed_tokens alone"
    ):
        trainer.train()


def test_versions_have_the_generation_config_of_the_model_byte_for_byte(model, server):
    insert(server.address, 6)
    content = b'{"temperature": 0.6,  "repetition_penalty": 1.05}\n'
    (model / "generation_config.json").write_bytes(content)
    made(model, ServerRollouts(server.address, WEIGHTS), max_steps=2, save_strategy="no").train()
    folders = published(WEIGHTS)
    assert len(folders) == 2
    for folder in folders:
        assert (folder / "generation_config.json").read_bytes() == content


# ---------------------------------------------------------------------------------------------------- what TRL gets


def test_trl_reads_the_groups_that_generators_inserted(model, server):
    first = make_group(version=1, loss_mask=[True, False, True, True, True, True], prompt=(5, 6))
    first.rollout_logprobs[2] = np.nan  # unknown
    second = make_group(version=0, seed=1, prompt=(7, 8, 9, 10))
    put(server.address, first, second)
    trainer = begun(server.address, model)
    trainer.model_version = 1
    rows = rows_of(trainer, 6)
    for group, part in ((first, rows[:3]), (second, rows[3:])):
        assert len({row["group_id"] for row in part}) == 1
        end = 0
        mask = np.ones(6, bool) if group.loss_mask is None else group.loss_mask
        mask = mask & np.isfinite(group.rollout_logprobs)
        for k, (row, completion) in enumerate(zip(part, group.completions(), strict=True)):
            tokens = slice(end, end := end + len(completion))
            prompt = len(group.prompt_ids)
            assert row["input_ids"].tolist() == [*group.prompt_ids.tolist(), *completion.tolist()]
            assert row["input_ids"].dtype == np.int64
            assert row["completion_mask"].dtype == np.int64
            assert row["completion_mask"].tolist() == [0] * prompt + mask[tokens].astype(int).tolist()
            expected = np.nan_to_num(group.rollout_logprobs[tokens], nan=0.0)
            np.testing.assert_allclose(row["old_log_probs"], [*([0.0] * prompt), *expected])
            assert row["old_log_probs"].dtype == np.float32
            assert row["advantage"] == pytest.approx(float(group.advantages[k]))
            assert row["metrics"]["reward"] == group.rewards[k]
    assert rows[0]["group_id"] != rows[3]["group_id"]
    metrics = trainer._metrics["train"]
    assert metrics["sample/staleness_max"] == [0.0] * 3 + [1.0] * 3
    assert all(0 <= seconds < 600 for seconds in metrics["sample/time_in_queue_s"])
    trainer.rollout_worker.stop()


def test_trl_reads_the_sequences_of_a_rollout_with_one_advantage_and_counts_its_reward_once(model, server):
    group = in_pieces(make_group(rewards=[1.0, 0.0], completions=[[5, 6, 7], [8, 9]], version=1), [[1, 2], []])
    put(server.address, group)
    trainer = begun(server.address, model)
    rows = rows_of(trainer, 4)
    prompt = group.prompt_ids.tolist()
    assert [row["input_ids"].tolist() for row in rows] == [[*prompt, *ids] for ids in ([5], [5, 6], [5, 6, 7], [8, 9])]
    assert [row["completion_mask"][2:].tolist() for row in rows] == [[1], [0, 1], [0, 0, 1], [1, 1]]
    assert [row["advantage"] for row in rows] == pytest.approx([group.advantages[k] for k in (0, 0, 0, 1)])
    assert [row["metrics"].get("reward") for row in rows] == [1.0, None, None, 0.0]
    trainer.rollout_worker.stop()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"token_advantages": [1.0, -1.0, 0.0]}, "token_advantages"),
        ({"prompt": (5, 4000)}, "the token 4000 of another"),
    ],
)
def test_a_group_that_trl_has_no_place_for_is_put_aside_and_named(model, server, caplog, fields, words):
    group = make_group(rewards=[1.0, 0.0], **fields)
    with ReplayClient(server.address) as client:
        keys = [client.insert(group, {"rollouts": 1.0}) for _ in range(2)]
    insert(server.address, 1)
    trainer = begun(server.address, model)
    assert len(rows_of(trainer, 4)) == 4  # of the next group
    for key in keys:
        assert f"key {key} in table 'rollouts' has {words}" in caplog.text
        # TRL adds up the values of a `_total`: one for each group.
        assert trainer.rollout_worker.metrics_queue.get_nowait() == {"replay/groups_unusable_total": 1.0}
    trainer.rollout_worker.stop()


@pytest.mark.parametrize(
    ("sampling", "options", "words"),
    [
        ({"temperature": 0.6}, {}, "temperature 0.6, and TRL computes with temperature 1.0"),
        ({}, {"temperature": 0.7}, "temperature 1.0, and TRL computes with temperature 0.7"),
        ({"top_k": 5}, {"top_k": 5}, "top_k 5, and TRL computes with top_k 0"),
        ({"temperature": 0.6, "top_p": 1.0, "top_k": -1, "min_p": None}, {"temperature": 0.6}, ""),
        ({"top_p": 0.5, "logprobs_mode": "raw_logprobs"}, {}, ""),
    ],
)
def test_groups_whose_log_probabilities_trl_does_not_compute_are_refused_with_both_values(
    model, server, sampling, options, words
):
    put(server.address, make_group(sampling=sampling))
    trainer = begun(server.address, model, **options)
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        rows_of(trainer, 3)
    trainer.rollout_worker.stop()


def test_groups_of_a_generator_with_another_model_are_refused(model, server):
    with ReplayClient(server.address, name="gen") as generator:
        generator.describe({"part": '"generator"', "model": '{"model_type": "llama", "vocabulary": 33}'})
        generator.insert(make_group(), {"rollouts": 1.0})
        trainer = begun(server.address, model)
        with pytest.raises(RuntimeError, match=r"gen has another .*\(model_type llama, vocabulary 33\).* qwen2"):
            rows_of(trainer, 1)
        trainer.rollout_worker.stop()


def test_a_group_without_variance_is_replaced_from_the_pool(model, server):
    informative, barren = make_group(version=1), make_group(rewards=(1.0, 1.0, 1.0), seed=5, version=2)
    put(server.address, informative, barren)
    trainer = begun(server.address, model)
    rows = rows_of(trainer, 6)
    # Drawn as a fresh one, the first group has joined the pool, and comes again in the place of the second.
    assert [row["input_ids"].tolist() for row in rows[3:]] == [row["input_ids"].tolist() for row in rows[:3]]
    assert [row["advantage"] for row in rows[3:]] == [row["advantage"] for row in rows[:3]]
    logs: dict[str, float] = {}
    trainer.model.train()
    trainer.log(logs)
    assert logs["replay/groups_replaced_total"] == 1.0
    assert logs["replay/fresh_zero_variance"] == 0.5
    with pytest.raises(queue.Empty):
        trainer.rollout_worker.metrics_queue.get_nowait()
    trainer.rollout_worker.stop()


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_a_server_that_comes_back_without_its_data_is_gone_on_with(model, tmp_path, before_step, caplog):
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        first = stack.enter_context(server_process(tmp_path, block("replay.toml"), f"127.0.0.1:{free_port()}"))
        insert(first.address, 10)

        def replace() -> None:
            first.kill()
            stack.enter_context(server_process(tmp_path, block("replay.toml"), first.address))
            insert(first.address, 10, first=10)

        before_step[2] = replace
        train(model, first.address, max_steps=6, token_budget=BUDGET, save_steps=3)
        with ReplayClient(first.address) as client:
            policy = client.policy()
            assert policy.version == 7
            assert policy.weights == str(published(WEIGHTS)[-1])
            assert client.server_info().tables["rollouts"].reserved == 0
    assert " could not be acknowledged: the leases had ended" in caplog.text


def test_a_trainer_without_generators_ends_with_what_the_server_says(model, server):
    insert(server.address, 1)
    with pytest.raises(RuntimeError, match=r"no rollout came for .* rollouts has been given 1 group"):
        train(model, server.address, max_steps=6, token_budget=BUDGET, heartbeat_stale_after_s=1.0)
    with ReplayClient(server.address) as client:
        assert client.server_info().tables["rollouts"].size == 1  # requeued


def test_two_trainers_on_one_server_do_not_go_unnoticed(model, server, before_step, caplog):
    insert(server.address, 12)

    def second() -> None:
        other = begun(server.address, model, ServerRollouts(server.address, "other/weights"))
        assert "another reader holds" in caplog.text
        other._sync_weight()
        other.rollout_worker.stop()

    before_step[2] = second
    with pytest.raises(
        RuntimeError, match=r"policy version 4 .*other/weights/step-4, .* left it at 3 .*another trainer"
    ):
        train(model, server.address, max_steps=6, token_budget=BUDGET)


def test_a_second_trainer_in_a_folder_is_refused(model, server, tmp_path):
    lock = FolderLock(tmp_path / WEIGHTS)
    assert lock.acquire() == ""
    with pytest.raises(RuntimeError, match="in use by another training run"):
        train(model, server.address, max_steps=1, token_budget=BUDGET)
    lock.release()


def test_mistakes_in_the_call_are_one_clear_error(model, server):
    with pytest.raises(TableNotFoundError):
        ServerRollouts(server.address, WEIGHTS, table="other")
    rollouts = ServerRollouts(server.address, WEIGHTS)
    trainer = made(model, rollouts)
    trainer.remove_callback(rollouts)
    with pytest.raises(RuntimeError, match=r"callbacks=\[rollouts\]"):
        trainer.train()
    rollouts = ServerRollouts(server.address, "other/weights")
    trainer = begun(server.address, model, rollouts, max_steps=1)
    rollouts.stop()
    with pytest.raises(RuntimeError, match="one call of train"):
        trainer.train()


def test_frozen_weights_are_refused(model, server):
    trainer = made(model, ServerRollouts(server.address, WEIGHTS), max_steps=1)
    trainer.model.lm_head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"1 of this model are frozen, such as lm_head\.weight"):
        trainer.train()


def test_the_last_checkpoint_is_the_newest_whole_one(tmp_path, caplog):
    assert last_checkpoint(tmp_path / "absent") is None
    for name, text in (("9", "{}"), ("10", '{"global_step": 10}'), ("11", '{"glob'), ("12", None), ("x", "{}")):
        folder = tmp_path / f"checkpoint-{name}"
        folder.mkdir()
        if text is not None:
            (folder / "trainer_state.json").write_text(text)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert caplog.text.count("is not whole") == 2
