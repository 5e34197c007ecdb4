"""A model that would compute something else than others do for it is refused in one sentence when it is loaded."""

import logging
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import ModelOutput

from replay_generator.engines import EngineError, SamplingConfig
from replay_generator.engines.model_checks import check_model, choose_attention
from replay_generator.engines.transformers import TransformersEngine
from replay_trainer.logprobs import LogprobModel
from tests.trainer.families import FAMILIES, HALVES, MOE, WINDOW, Family
from tests.trainer.test_families import save

CAPPED = Family("gemma2", config=HALVES | {"head_dim": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8})
ALIBI = Family("falcon", config={"alibi": True, "new_decoder_architecture": False})


def test_a_capped_attention_is_computed_eagerly_and_said(caplog):
    model = CAPPED.make()
    assert model.config._attn_implementation == "sdpa"
    with caplog.at_level(logging.WARNING):
        choose_attention(model)
        choose_attention(model)
    assert model.config._attn_implementation == "eager"
    assert len([record for record in caplog.records if "attn_logit_softcapping = 2" in record.message]) == 1


async def test_every_reload_of_the_engine_keeps_the_cap_and_says_it_once(tmp_path, caplog):
    folder = save(CAPPED, tmp_path / "model")
    version = save(CAPPED, tmp_path / "step-1", seed=1)
    engine = TransformersEngine(folder)
    for path, seed in ((folder, 0), (version, 1)):
        await engine.load_weights(str(path), seed)
        token_ids = [5, 9, 3, 20, 41, 7]
        expected = CAPPED.alone(CAPPED.reference(seed), token_ids)
        torch.testing.assert_close(torch.tensor(await engine.score(token_ids)), expected, atol=1e-4, rtol=0)
    assert len([record for record in caplog.records if "attn_logit_softcapping" in record.message]) == 1
    await engine.close()


def test_the_engine_refuses_lengths_at_which_a_model_scales_by_places_in_the_row(tmp_path):
    chunks = FAMILIES["llama4, chunks"]
    tuned = replace(chunks, config={**chunks.config, "attn_temperature_tuning": True, "floor_scale": 16})
    folder = save(tuned, tmp_path / "model")
    TransformersEngine(folder, max_length=16)
    with pytest.raises(EngineError, match=r"llama4_text .* beyond 16 tokens.* set max_length = 16"):
        TransformersEngine(folder)


def test_the_engine_refuses_lengths_at_which_a_cache_forgets_what_attention_reads(tmp_path):
    family = FAMILIES["moshi, window of the cache alone"]
    folder = save(family, tmp_path / "model")
    TransformersEngine(folder, max_length=WINDOW)
    with pytest.raises(EngineError, match=rf"moshi .* beyond {WINDOW} tokens.* set max_length = {WINDOW}"):
        TransformersEngine(folder, max_length=WINDOW + 1)


def test_a_model_whose_sdpa_differs_is_refused_unless_a_table_says_that_it_is_right():
    model = ALIBI.make()
    check_model(model)
    assert model.config._attn_implementation == "sdpa"
    model.config.model_type = "another"
    with pytest.raises(ValueError, match=r"another: with sdpa and with eager attention .* differ by"):
        check_model(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_check_leaves_the_attention_of_a_model_as_it_was():
    for implementation in ("sdpa", "eager"):
        model = Family("llama").make()
        model.set_attn_implementation(implementation)
        check_model(model)
        assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_causal_model_passes_in_each_dtype(dtype):
    check_model(Family("qwen3_moe", config=MOE | {"head_dim": 8}).make().to(dtype))


def test_a_model_whose_forward_pass_fails_is_named():
    model = Family("llama").make()
    model.model.norm = torch.nn.Linear(7, 7)
    with pytest.raises(
        ValueError, match="llama cannot complete a text: a forward pass of 12 tokens fails with Runtime"
    ):
        check_model(model)


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, KeyError, AssertionError, IndexError])
def test_a_route_that_a_model_does_not_take_is_left_out_whatever_it_raises(error):
    model = Family("llama").make()
    attention = model.model.layers[0].self_attn
    plain = attention.forward

    def forward(*arguments, **options):
        if "replay_layout" in options:
            raise error("not like this")
        return plain(*arguments, **options)

    attention.forward = forward
    assert LogprobModel(model).route == "padded"


async def test_the_trial_of_the_engine_moves_none_of_its_random_numbers(tmp_path, monkeypatch):
    folder = save(Family("llama"), tmp_path / "model")
    drawn = []
    for with_trial in (True, False):
        if not with_trial:
            monkeypatch.setattr("replay_generator.engines.transformers._check_batches", lambda model: None)
        torch.manual_seed(5)
        random.seed(5)
        engine = TransformersEngine(folder, seed=7)
        completions = await engine.generate([5, 9, 3], SamplingConfig(max_tokens=12), 4)
        drawn.append([completion.token_ids for completion in completions])
        drawn.append([torch.rand(1).item(), random.random()])
        await engine.close()
    assert drawn[0] == drawn[2]
    assert drawn[1] == drawn[3]


async def test_the_engine_draws_from_a_model_that_calls_its_keys_and_values_a_cache(tmp_path, monkeypatch):
    # transformers 5.24 gives them this name, in the arguments and in what a model returns.
    folder = save(Family("llama"), tmp_path / "model")
    load = AutoModelForCausalLM.from_pretrained

    def renamed(*arguments, **options):
        model = load(*arguments, **options)
        plain = model.forward

        def forward(input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None, **more):
            output = plain(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=use_cache,
                **more,
            )
            return ModelOutput(logits=output.logits, cache=output.past_key_values)

        model.forward = forward
        return model

    old = TransformersEngine(folder, seed=7)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", renamed)
    new = TransformersEngine(folder, seed=7)
    sampling = SamplingConfig(max_tokens=9)
    expected = await old.generate([5, 9, 3], sampling, 3)
    found = await new.generate([5, 9, 3], sampling, 3)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [each.logprobs for each in found] == [each.logprobs for each in expected]
    await old.close()
    await new.close()


def test_a_model_that_fails_in_a_batch_is_refused_with_its_error(tmp_path, monkeypatch):
    folder = save(Family("llama"), tmp_path / "model")
    load = AutoModelForCausalLM.from_pretrained

    def broken(*arguments, **options):
        model = load(*arguments, **options)
        plain = model.forward

        def forward(input_ids=None, past_key_values=None, **more):
            if past_key_values is not None:
                raise NotImplementedError("no decoding")
            return plain(input_ids=input_ids, **more)

        model.forward = forward
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", broken)
    with pytest.raises(
        EngineError, match=r"cannot draw from llama .*NotImplementedError: no decoding. Take --engine vllm"
    ):
        TransformersEngine(folder)


def test_a_model_whose_cache_does_not_follow_the_rows_of_a_batch_is_refused(tmp_path, monkeypatch):
    folder = save(Family("llama"), tmp_path / "model")
    monkeypatch.setattr(DynamicCache, "reorder_cache", lambda cache, rows: None)
    with pytest.raises(EngineError, match=r"cannot draw from llama .*Take --engine vllm"):
        TransformersEngine(folder)
