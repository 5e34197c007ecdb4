"""No token is lost on the way from groups to log-probabilities, whatever the lengths, the group sizes or the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_factories import make_group, make_model
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from replay_client.rollout import RolloutGroup
from replay_trainer.batching import chosen_logprobs, micro_batches, to_batch

RAGGED = [
    make_group(
        rewards=[1, 0, 1],
        prompt=[3, 4, 5, 6, 7],
        completions=[[8, 9], [], [10, 11, 12, 13]],
        logprobs=[-0.1, -0.2, np.nan, -0.4, -0.5, -0.6],
        loss_mask=[True, False, True, True, False, True],
    ),
    make_group(rewards=[0, 1], prompt=[14], completions=[[3], [4, 5, 6, 7, 8]], sampling={"temperature": 0.7}),
]


def make_other_model(kind: str) -> Any:
    """Models that place tokens in different ways: learned, offset and counted from the mask, linear biases, rotary."""
    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=32, n_embd=32, n_layer=2, n_head=2)).eval()
    if kind == "opt":
        config = OPTConfig(
            vocab_size=16,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            word_embed_proj_dim=32,
            pad_token_id=1,
        )
        return OPTForCausalLM(config).eval()
    if kind == "bloom":
        return BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=32, n_layer=2, n_head=2)).eval()
    return make_model()


@torch.no_grad()
def logprobs_one_by_one(model: Any, group: RolloutGroup) -> list[torch.Tensor]:
    """Each completion alone behind its prompt, without any padding."""
    rows = []
    for completion in group.completions():
        ids = torch.tensor([*group.prompt_ids.tolist(), *completion.tolist()])
        logits = model(ids[None]).logits[0].float() / group.sampling.get("temperature", 1.0)
        predicted = logits.log_softmax(-1)[len(group.prompt_ids) - 1 : -1]
        rows.append(torch.tensor([row[token] for row, token in zip(predicted, completion.tolist(), strict=True)]))
    return rows


def test_every_completion_is_a_row_behind_its_own_prompt() -> None:
    batch = to_batch(RAGGED)
    assert batch.input_ids_BS.tolist() == [
        [3, 4, 5, 6, 7, 8, 9, 0, 0],
        [3, 4, 5, 6, 7, 0, 0, 0, 0],
        [3, 4, 5, 6, 7, 10, 11, 12, 13],
        [14, 3, 0, 0, 0, 0, 0, 0, 0],
        [14, 4, 5, 6, 7, 8, 0, 0, 0],
    ]
    assert batch.attention_mask_BS.sum(1).tolist() == [7, 5, 9, 2, 6]
    assert batch.position_ids_BS.tolist() == [list(range(9))] * 5
    assert batch.completion_ids_BT.tolist() == [
        [8, 9, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [10, 11, 12, 13, 0],
        [3, 0, 0, 0, 0],
        [4, 5, 6, 7, 8],
    ]
    assert batch.mask_BT.int().tolist() == [
        [1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1],
    ]
    np.testing.assert_allclose(batch.rollout_logprobs_BT[2].numpy(), np.float32([np.nan, -0.4, -0.5, -0.6, 0]))
    assert batch.group_B.tolist() == [0, 0, 0, 1, 1]
    assert batch.temperature_B.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.7, 0.7])
    np.testing.assert_array_equal(batch.advantages_B.numpy(), np.concatenate([g.advantages for g in RAGGED]))


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "opt", "bloom"])
def test_logprobs_are_those_of_each_completion_alone(kind: str) -> None:
    model = make_other_model(kind)
    batch = to_batch(RAGGED)
    with torch.no_grad():
        logprobs_BT = chosen_logprobs(model, batch)
    expected = [row for group in RAGGED for row in logprobs_one_by_one(model, group)]
    for row, alone in zip(logprobs_BT, expected, strict=True):
        torch.testing.assert_close(row[: len(alone)], alone, atol=1e-5, rtol=1e-5)
        assert (row[len(alone) :] == 0).all()


def test_logprobs_come_in_float32_from_a_bfloat16_model() -> None:
    batch = to_batch(RAGGED)
    logprobs_BT = chosen_logprobs(make_model().bfloat16(), batch)
    assert logprobs_BT.dtype == torch.float32
    # A log-softmax in bfloat16 would make most of these equal to two or three digits.
    values = logprobs_BT[batch.mask_BT].detach()
    assert (values != values.bfloat16().float()).any()


def test_the_gradient_reaches_the_model_through_every_row() -> None:
    model = make_model()
    whole = chosen_logprobs(model, to_batch(RAGGED)).sum()
    alone = sum(chosen_logprobs(model, to_batch([group])).sum() for group in RAGGED)
    for a, b in zip(
        torch.autograd.grad(whole, list(model.parameters())),
        torch.autograd.grad(alone, list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@st.composite
def groups(draw: st.DrawFn) -> list[RolloutGroup]:
    token = st.integers(3, 15)
    out = []
    for _ in range(draw(st.integers(1, 3))):
        completions = draw(st.lists(st.lists(token, max_size=5), min_size=1, max_size=3))
        rewards = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(completions), max_size=len(completions)))
        prompt = draw(st.lists(token, min_size=1, max_size=5))
        temperature = draw(st.sampled_from([0.5, 1.0, 1.3]))
        out.append(
            make_group(rewards=rewards, prompt=prompt, completions=completions, sampling={"temperature": temperature})
        )
    return out


MODEL = make_model()


@settings(max_examples=12, deadline=None)
@given(groups(), st.integers(1, 6))
def test_micro_batches_hold_every_row_once_and_change_no_logprob(batch_groups: list[RolloutGroup], size: int) -> None:
    batch = to_batch(batch_groups)
    seen: list[int] = []
    with torch.no_grad():
        whole_BT = chosen_logprobs(MODEL, batch)
        for rows, micro in micro_batches(batch, size):
            assert 1 <= micro.num_rows <= size
            T = micro.mask_BT.shape[1]
            assert max(int(batch.completion_lengths_B[rows].max()), 1) == T
            assert torch.equal(micro.mask_BT, batch.mask_BT[rows, :T])
            assert torch.equal(micro.advantages_B, batch.advantages_B[rows])
            torch.testing.assert_close(chosen_logprobs(MODEL, micro), whole_BT[rows, :T], atol=1e-5, rtol=1e-5)
            seen += rows.tolist()
    assert sorted(seen) == list(range(batch.num_rows))
    expected = [row for group in batch_groups for row in logprobs_one_by_one(MODEL, group)]
    for row, alone in zip(whole_BT, expected, strict=True):
        torch.testing.assert_close(row[: len(alone)], alone, atol=1e-5, rtol=1e-5)


def test_no_groups_make_a_batch_without_rows() -> None:
    batch = to_batch([])
    assert batch.num_rows == 0
    assert batch.mask_BT.shape == (0, 1)
    assert list(micro_batches(batch, 4)) == []


def test_an_empty_prompt_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"group 1 \(prompt_id 'p7'\) has an empty prompt"):
        to_batch([make_group(), make_group(prompt=[], prompt_id="p7")])


def test_greedy_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature 0\.0"):
        to_batch([make_group(sampling={"temperature": 0})])
