"""The main job with the real server process, the real vLLM engine and the real trainer."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from replay_client import ReplayClient, RolloutGroup
from replay_client.scoring import is_zero_variance
from replay_client.testing import until
from replay_trainer import GRPOConfig, GRPOTrainer
from replay_trainer.batching import Batch
from replay_trainer.groups import Replacement, ZeroVarianceReplacer
from tests.kit.processes import server_process
from tests.system.conftest import CONFIG

GROUPS, STEPS = 3, 12  # three groups of four completions a step: groups != generations


class Recorder:
    """Keeps what each step replaced and the tensors it trained on, and what the server held at that moment."""

    def __init__(self, monkeypatch, client: ReplayClient) -> None:
        self.replacements: list[Replacement] = []
        self.batches: list[Batch] = []
        self.stored: dict[int, RolloutGroup] = {}
        replace, to_batch = ZeroVarianceReplacer.replace, GRPOTrainer._to_batch

        def recording_replace(replacer, *arguments):
            replacement = replace(replacer, *arguments)
            keys = [replacement.samples[row].info.key for row in replacement.replaced]
            self.stored |= {item.key: item.group for item in client.get(keys)}
            self.replacements.append(replacement)
            return replacement

        def recording_to_batch(trainer, *arguments):
            self.batches.append(to_batch(trainer, *arguments))
            return self.batches[-1]

        monkeypatch.setattr(ZeroVarianceReplacer, "replace", recording_replace)
        monkeypatch.setattr(GRPOTrainer, "_to_batch", recording_to_batch)


def check_rows(batch: Batch, rows: list[int], group: RolloutGroup) -> None:
    """Every row of the group is in the batch: prompt, completion, sampler's log-probabilities, advantage."""
    assert len(rows) == group.group_size
    start = 0
    for row, length, advantage in zip(rows, group.completion_lengths.tolist(), group.advantages, strict=True):
        tokens = group.completion_ids[start : start + length]
        logprobs = group.rollout_logprobs[start : start + length]
        start += length
        number = batch.group_B[row]
        prompt_ids = batch.prompt_ids_UP[number, : batch.prompt_lengths_U[number]]
        assert prompt_ids.tolist() == group.prompt_ids.tolist()
        assert batch.completion_ids_BT[row, :length].tolist() == tokens.tolist()
        assert batch.mask_BT[row].sum().item() == length
        assert batch.rollout_logprobs_BT[row, :length].tolist() == pytest.approx(logprobs.tolist())
        assert batch.advantages_B[row].item() == pytest.approx(float(advantage))


@pytest.mark.long
def test_vllm_fills_the_server_and_the_trainer_replaces_and_trains(tmp_path, monkeypatch, model_folder, generate):
    pytest.importorskip("vllm", reason="the set-up installs vLLM unless ENGINE=transformers")
    with server_process(tmp_path, CONFIG) as server, ReplayClient(server.address, timeout=60.0) as client:
        generator = generate(server.address, "vllm", "--json", "--wait-for-policy")
        recorder = Recorder(monkeypatch, client)
        config = GRPOConfig(
            output_dir=tmp_path / "train",
            groups_per_step=GROUPS,
            max_tokens_per_micro_batch=64,
            max_steps=STEPS,
            learning_rate=1e-3,
            sample_timeout=300.0,
        )
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        model = AutoModelForCausalLM.from_pretrained(model_folder)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        GRPOTrainer(model, client, config, tokenizer).train()

        metrics = [json.loads(line) for line in (tmp_path / "train/metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
        assert sum(line["replay/groups_replaced"] for line in metrics) > 0
        assert max(line["fresh/staleness_max"] for line in metrics) > 0

        # What was trained on is, row for row, what the server holds.
        lengths = set()
        for replacement, batch in zip(recorder.replacements, recorder.batches, strict=True):
            assert len({sample.info.key for sample in replacement.samples}) == GROUPS
            rows_of = [np.flatnonzero(batch.group_B == number).tolist() for number in range(GROUPS)]
            for number, (sample, rows) in enumerate(zip(replacement.samples, rows_of, strict=True)):
                group = recorder.stored[sample.info.key] if number in replacement.replaced else sample.group
                assert group == sample.group
                assert set(np.unique(group.rewards)) <= {0.0, 1.0}
                check_rows(batch, rows, group)
                lengths |= set(group.completion_lengths.tolist())
                assert number not in replacement.replaced or not is_zero_variance(group.rewards)
        assert len(lengths) > 1

        # A group of version 0 has the log-probabilities of the weights it was drawn from: the first correction is 1.
        assert metrics[0]["correction/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert metrics[0]["correction/logprob_diff_max"] < 1e-3
        assert any(not torch.equal(before[name], weight) for name, weight in model.state_dict().items())

        # The generator followed: it reloaded later versions and agrees with the trainer on them.
        assert client.policy().version == STEPS
        until(lambda: client.sample("rollouts", 1)[0].info.policy_version == STEPS, pause=0.1)
        generator.terminate()
        assert generator.wait(timeout=200) == 0
        assert "Traceback" not in generator.output()
        last = json.loads([line for line in generator.output().splitlines() if line.startswith("{")][-1])
        assert last["policy_version"] == STEPS
        assert last["reloads"] > 2
        assert last["probe_max_difference"] < 1e-3


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def train(replay, model_folder, tmp_path):
    (tmp_path / "train.toml").write_text(f"groups_per_step = {GROUPS}\nlearning_rate = 1e-4\nsample_timeout = 600.0\n")

    def start(address: str, steps: int, *more: str):
        return replay(
            *(
                "--address",
                address,
                "--timeout",
                "5",
                "train",
                "--model",
                str(model_folder),
                "--output-dir",
                str(tmp_path / "train"),
            ),
            *("--config", str(tmp_path / "train.toml"), "--max-steps", str(steps), *more),
        )

    return start


@pytest.mark.long
def test_generator_and_trainer_may_be_killed_and_started_again(tmp_path, generate, train):
    folder = tmp_path / "train"
    with server_process(tmp_path, CONFIG) as server, ReplayClient(server.address) as client:
        generator, trainer = generate(server.address, "transformers"), train(server.address, 100_000, "--resume")
        until(lambda: steps_done(folder) >= 5, pause=0.1)
        generator.kill()
        generator.wait()
        generate(server.address, "transformers")
        after = steps_done(folder) + 10
        until(lambda: steps_done(folder) >= after, pause=0.1)
        assert trainer.poll() is None
        trainer.kill()
        trainer.wait()
        published = client.policy().version
        assert published > 0
        steps = steps_done(folder) + 20
        again = train(server.address, steps, "--resume")
        assert again.wait(timeout=200) == 0, again.output()
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
        assert client.policy().version == steps
        nothing = train(server.address, steps, "--resume")
        assert nothing.wait(timeout=200) == 0, nothing.output()
        assert (
            "nothing was trained, for the run has all its steps already: --max-steps makes it longer"
            in nothing.output()
        )


@pytest.mark.long
def test_killing_the_server_ends_generator_and_trainer_with_a_clear_error(tmp_path, generate, train):
    with server_process(tmp_path, CONFIG) as server:
        generator, trainer = generate(server.address, "transformers"), train(server.address, 1000)
        until(lambda: steps_done(tmp_path / "train") >= 2, pause=0.1)
        server.kill()
        for command in (generator, trainer):
            assert command.wait(timeout=200) == 1
            assert f"no replay server answers at {server.address} (tried for 5 s)" in command.output()
            assert "Traceback" not in command.output()
