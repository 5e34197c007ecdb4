"""The rotary frequencies of a model follow from the length that engines serve, and from nothing else."""

import copy

import pytest
import torch

from replay_generator.engines.rotary_frequencies import (
    default_length,
    fix_frequencies,
    frequency_facts,
    why_other_frequencies,
)
from tests.trainer.families import LOCAL_MOE, ORIGINAL, Family, longrope, scaled

LONG = Family("llama", config=longrope())
DYNAMIC = Family("llama", config=scaled("dynamic") | {"max_position_embeddings": ORIGINAL})


def logits_of_the_first_row(model, *lengths: int) -> torch.Tensor:
    """(8, V) of eight tokens, beside further rows of these lengths."""
    longest = max(8, *lengths)
    ids = torch.arange(3, 3 + longest).remainder(60).expand(len(lengths) + 1, -1)
    mask = torch.tensor([[1] * length + [0] * (longest - length) for length in (8, *lengths)])
    positions = torch.arange(longest).expand_as(ids)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[0, :8]


@pytest.mark.parametrize("max_length", [8, ORIGINAL, ORIGINAL + 1, 128])
@pytest.mark.parametrize("kind", ["llama", "phi3", "gemma3_text"])
def test_a_sequence_has_the_same_logits_whatever_stands_beside_it(kind, max_length):
    config = longrope()
    if kind == "gemma3_text":  # frequencies of their own for each type of layer
        plain = {"rope_type": "default", "rope_theta": 1e4}
        config = {"rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": plain}}
        config |= {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
    model = Family(kind, config=config).make()
    assert fix_frequencies(model, max_length) == max_length
    alone = logits_of_the_first_row(model, 8)
    for beside in (9, ORIGINAL, ORIGINAL + 1, 69):
        torch.testing.assert_close(logits_of_the_first_row(model, beside), alone, atol=1e-5, rtol=0)


def test_the_long_factors_belong_to_lengths_above_the_original_one():
    short, at, above = LONG.make(), LONG.make(), LONG.make()
    fix_frequencies(short, 8)
    fix_frequencies(at, ORIGINAL)
    fix_frequencies(above, ORIGINAL + 1)
    plain_short = logits_of_the_first_row(LONG.make(), 8)
    plain_long = logits_of_the_first_row(LONG.make(), ORIGINAL + 1)
    torch.testing.assert_close(logits_of_the_first_row(short, 8), plain_short, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits_of_the_first_row(at, 8), plain_short, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits_of_the_first_row(above, 8), plain_long, atol=1e-5, rtol=0)
    assert (plain_short - plain_long).abs().max() > 0.1


def test_dynamic_frequencies_stay_those_of_the_base_as_in_vllm():
    model = DYNAMIC.make()
    assert fix_frequencies(model, None) == ORIGINAL
    plain = logits_of_the_first_row(DYNAMIC.make(), 8)
    torch.testing.assert_close(logits_of_the_first_row(model, ORIGINAL), plain, atol=1e-5, rtol=0)


def test_a_copy_keeps_the_choice_and_a_second_choice_counts():
    model = LONG.make()
    fix_frequencies(model, 128)
    copied = copy.deepcopy(model)
    long = logits_of_the_first_row(model, 8)
    torch.testing.assert_close(logits_of_the_first_row(copied, 8), long, atol=0, rtol=0)
    fix_frequencies(copied, 8)
    assert (logits_of_the_first_row(copied, 8) - long).abs().max() > 0.1


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (longrope(), ORIGINAL),  # vLLM serves such a model with the original length by default
        ({"rope_parameters": longrope()["rope_parameters"]}, 128),  # unless it is named among the parameters alone
        (scaled("dynamic"), 128),
        (scaled("yarn", original_max_position_embeddings=ORIGINAL), None),
        (scaled("linear"), None),
        ({}, None),
    ],
)
def test_the_default_length_is_that_of_vllm_where_frequencies_depend_on_one(config, length):
    model = Family("llama", config=config).make()
    assert default_length(model.config) == length
    assert fix_frequencies(model, None) == length


@pytest.mark.parametrize(
    ("family", "max_length", "message"),
    [
        (DYNAMIC, ORIGINAL + 1, "max_length = 33 is more than llama has frequencies for"),
        (
            Family("llama", config=scaled("dynamic", max_trained_positions=64)),
            None,
            "max_trained_positions = 64, which vLLM uses and transformers does not",
        ),
        (
            Family("phimoe", config=LOCAL_MOE | longrope(short_mscale=1.1, long_mscale=1.2)),
            ORIGINAL + 1,
            "set max_length to 32 or less",
        ),
    ],
)
def test_a_length_that_a_model_cannot_have_is_refused(family, max_length, message):
    with pytest.raises(ValueError, match=message):
        fix_frequencies(family.make(), max_length)


@pytest.mark.parametrize(
    ("trained", "served", "refused"),
    [
        (ORIGINAL, ORIGINAL, False),
        (ORIGINAL, 8, False),
        (ORIGINAL, ORIGINAL + 1, True),
        (ORIGINAL + 1, ORIGINAL, True),
        (64, 128, False),
    ],
)
def test_an_engine_that_chooses_otherwise_is_refused_with_both_numbers(trained, served, refused):
    facts = frequency_facts(LONG.make().config, trained)
    why = why_other_frequencies(facts, served)
    assert bool(why) == refused
    if refused:
        assert f"up to {served} tokens" in why
        assert f"max_length = {trained}" in why


def test_a_model_without_a_choice_says_nothing_of_frequencies():
    model = Family("llama").make()
    assert frequency_facts(model.config, fix_frequencies(model, 64)) == {}
    assert why_other_frequencies({}, 64) == ""
