"""No token is lost on the way from groups to log-probabilities, whatever the lengths, sizes, model or route."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from replay_client.rollout import RolloutGroup
from replay_client.testing import make_group
from replay_trainer import logprobs
from replay_trainer.batching import micro_batches, packed_input, padded_input, to_batch
from replay_trainer.logprobs import LogprobModel, Route, chosen_logprobs
from tests.kit.models import make_model

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


SMALL = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_other_model(kind: str) -> Any:
    """Models that place tokens in different ways: learned, offset and counted from the mask, linear biases, rotary."""
    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=32, n_embd=32, n_layer=2, n_head=2)).eval()
    if kind == "opt":
        config = OPTConfig(**SMALL, ffn_dim=64, max_position_embeddings=32, word_embed_proj_dim=32, pad_token_id=1)
        return OPTForCausalLM(config).eval()
    if kind == "sliding":
        window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
        return Qwen2ForCausalLM(Qwen2Config(**SMALL, intermediate_size=64, num_key_value_heads=2, **window)).eval()
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


ROUTES: list[Route] = ["packed", "padded", "logits"]


@pytest.mark.parametrize(
    ("kind", "route"),
    [(kind, route) for kind in ("qwen2", "sliding", "gpt2", "opt") for route in ROUTES]
    + [("bloom", "padded"), ("bloom", "logits")],
)
def test_logprobs_are_those_of_each_completion_alone(kind, route):
    model = LogprobModel(make_other_model(kind))
    batch = to_batch(RAGGED)
    model.route = route
    with torch.no_grad():
        logprobs_BT, entropy_BT = model(batch)
    expected = [row for group in RAGGED for row in logprobs_one_by_one(model.model, group)]
    for row, mask, alone in zip(logprobs_BT, batch.mask_BT, expected, strict=True):
        torch.testing.assert_close(row[: len(alone)], alone * mask[: len(alone)], atol=1e-5, rtol=1e-5)
    assert (logprobs_BT[~batch.mask_BT] == 0).all()
    assert (entropy_BT[~batch.mask_BT] == 0).all()
    assert (entropy_BT[batch.mask_BT] > 0).all()
    assert (entropy_BT <= math.log(16) + 1e-5).all()


@pytest.mark.parametrize(
    ("kind", "route"),
    [("qwen2", "packed"), ("sliding", "packed"), ("gpt2", "packed"), ("opt", "packed"), ("bloom", "padded")],
)
def test_a_model_takes_the_fastest_route_that_is_right_for_it(kind, route):
    assert LogprobModel(make_other_model(kind)).route == route


def test_packing_can_be_switched_off():
    assert LogprobModel(make_model(), packing=False).route == "padded"


def test_a_head_that_does_more_than_a_linear_layer_goes_through_the_whole_model():
    torch.manual_seed(0)
    heads = {"num_key_value_heads": 1, "head_dim": 16, "attn_implementation": "eager"}
    config = Gemma2Config(**SMALL, intermediate_size=64, **heads, final_logit_softcapping=0.1)
    assert LogprobModel(Gemma2ForCausalLM(config).eval()).route == "logits"


def test_a_packed_model_still_masks_the_padding_of_other_callers():
    model = LogprobModel(make_model()).model
    ids = torch.tensor([[0, 0, 3, 4, 5]])
    with torch.no_grad():
        alone = model(torch.tensor([[3, 4, 5]])).logits[0]
        positions = torch.tensor([[0, 0, 0, 1, 2]])
        padded = model(ids, attention_mask=(ids > 0).long(), position_ids=positions).logits[0, 2:]
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-5)


def test_logprobs_come_in_float32_from_a_bfloat16_model():
    batch = to_batch(RAGGED)
    logprobs_BT, _ = LogprobModel(make_model().bfloat16())(batch)
    assert logprobs_BT.dtype == torch.float32
    # A log-softmax in bfloat16 would make most of these equal to two or three digits.
    values = logprobs_BT[batch.mask_BT].detach()
    assert (values != values.bfloat16().float()).any()


def gradients_of(model: LogprobModel, batches: list[Any]) -> list[torch.Tensor]:
    total = sum((model(batch)[0] * torch.arange(1, batch.mask_BT.shape[1] + 1)).sum() for batch in batches)
    return list(torch.autograd.grad(total, list(model.parameters())))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_gradient_is_that_of_the_plain_model(route, gradient_checkpointing):
    plain = LogprobModel(make_model())
    plain.route = "logits"
    expected = gradients_of(plain, [to_batch([group]) for group in RAGGED])
    model = LogprobModel(make_model(), gradient_checkpointing=gradient_checkpointing)
    model.route = route
    for ours, theirs in zip(gradients_of(model, [to_batch(RAGGED)]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_gradient_checkpointing_keeps_fewer_activations():
    def kept(gradient_checkpointing: bool) -> int:
        model = LogprobModel(make_model(), gradient_checkpointing=gradient_checkpointing)
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(to_batch(RAGGED))
        return sum(seen.values()) - sum(p.untyped_storage().nbytes() for p in model.parameters())

    assert kept(True) < kept(False) / 2


def test_dropout_is_off_whatever_the_mode():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=16, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5, attn_pdrop=0.5)
    model = LogprobModel(GPT2LMHeadModel(config)).train()
    assert torch.equal(model(to_batch(RAGGED))[0], model(to_batch(RAGGED))[0])


@pytest.mark.parametrize("chunk", [1, 40, 10**6])
@pytest.mark.parametrize("bias", [False, True])
def test_the_head_in_chunks_is_the_log_softmax_of_all_logits(monkeypatch, chunk, bias):
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, requires_grad=True)
    offset = torch.randn(11, generator=generator, requires_grad=True) if bias else None
    ids = torch.randint(0, 11, (7,), generator=generator)
    temperature, upstream = torch.rand(7, generator=generator) + 0.5, torch.randn(7, generator=generator)
    inputs = [hidden, weight] + ([offset] if offset is not None else [])

    ours, entropy = chosen_logprobs(hidden, weight, offset, ids, temperature)
    logits = (hidden @ weight.T + (0 if offset is None else offset)) / temperature[:, None]
    distribution = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(ours, distribution.log_prob(ids))
    torch.testing.assert_close(entropy, distribution.entropy().detach())
    assert not entropy.requires_grad
    expected = torch.autograd.grad((distribution.log_prob(ids) * upstream).sum(), inputs)
    for gradient, other in zip(torch.autograd.grad((ours * upstream).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-4)


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


MODEL = LogprobModel(make_model())


@settings(max_examples=12, deadline=None)
@given(groups(), st.integers(1, 30), st.booleans())
def test_micro_batches_hold_every_row_once_and_change_no_logprob(batch_groups, max_tokens, packed):
    batch = to_batch(batch_groups)
    seen: list[int] = []
    MODEL.route = "packed" if packed else "padded"
    with torch.no_grad():
        whole_BT, _ = MODEL(batch)
        for rows, micro in micro_batches(batch, max_tokens, packed):
            inputs = packed_input(micro) if packed else padded_input(micro)
            assert inputs.input_ids_RS.numel() <= max_tokens or micro.num_rows == 1
            T = micro.mask_BT.shape[1]
            assert max(int(batch.completion_lengths_B[rows].max()), 1) == T
            assert torch.equal(micro.mask_BT, batch.mask_BT[rows, :T])
            assert torch.equal(micro.advantages_B, batch.advantages_B[rows])
            torch.testing.assert_close(MODEL(micro)[0], whole_BT[rows, :T], atol=1e-5, rtol=1e-5)
            seen += rows.tolist()
    assert sorted(seen) == list(range(batch.num_rows))
    expected = [row for group in batch_groups for row in logprobs_one_by_one(MODEL.model, group)]
    for row, alone in zip(whole_BT, expected, strict=True):
        torch.testing.assert_close(row[: len(alone)], alone, atol=1e-5, rtol=1e-5)


def test_no_groups_make_a_batch_without_rows():
    batch = to_batch([])
    assert batch.num_rows == 0
    assert batch.mask_BT.shape == (0, 1)
    assert list(micro_batches(batch, 4)) == []


def test_an_empty_prompt_is_refused_by_name():
    with pytest.raises(ValueError, match=r"group 1 \(prompt_id 'p7'\) has an empty prompt"):
        to_batch([make_group(), make_group(prompt=[], prompt_id="p7", validate=False)])


def test_greedy_samples_are_refused():
    with pytest.raises(ValueError, match=r"temperature 0\.0"):
        to_batch([make_group(sampling={"temperature": 0})])
