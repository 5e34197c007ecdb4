"""RolloutGroup and its byte format."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_client import RolloutGroup, group_from_completions
from replay_client.rollout import ALIGNMENT, MAGIC
from tests.factories import make_group


def full_group() -> RolloutGroup:
    return make_group(
        lengths=(4, 0, 1),
        rewards=(0.0, 1.0, 0.0),
        policy_version_end=3,
        prompt_id="naïve/7",
        loss_mask=[True, False, True, True, False],
        finish_reasons=("stop", "length", "stop"),
        sampling={"temperature": 0.7, "top_k": 0},
        extras={"reference": np.arange(5, dtype=np.float16), "image": np.zeros((2, 0, 3), np.uint8)},
        meta={"row": 12, "tags": ["a", None]},
    )


def test_a_group_survives_encoding_bit_for_bit():
    group = full_group()
    group.rollout_logprobs[1] = math.nan
    decoded = RolloutGroup.decode(group.encode())
    assert decoded == group
    assert decoded.finish_reasons == ("stop", "length", "stop")
    assert [completion.tolist() for completion in decoded.completions()] == [
        completion.tolist() for completion in group.completions()
    ]
    assert decoded.completions()[1].size == 0


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    prompt=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    version=st.integers(-(2**40), 2**40),
    prompt_id=st.text(max_size=8),
    meta=st.dictionaries(st.text(max_size=4), st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text())),
)
def test_any_group_survives_encoding(lengths, prompt, version, prompt_id, meta):
    group = make_group(
        prompt=np.array(prompt, dtype=np.int64),
        lengths=lengths,
        rewards=[float(n % 2) for n in lengths],
        version=version,
        prompt_id=prompt_id,
        meta=meta,
    )
    assert RolloutGroup.decode(group.encode()) == group


def test_arrays_are_aligned_and_decoded_as_views():
    buffer = np.frombuffer(full_group().encode(), dtype=np.uint8)
    decoded = RolloutGroup.decode(memoryview(buffer))
    start = buffer.ctypes.data
    for array in (decoded.prompt_ids, decoded.completion_ids, decoded.rollout_logprobs, decoded.rewards):
        assert (array.ctypes.data - start) % ALIGNMENT == 0
        assert np.shares_memory(array, buffer)
        assert not array.flags.writeable


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_bytes_give_a_value_error_or_a_sound_group_never_anything_else(data):
    encoded = bytearray(full_group().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(encoded)))
    try:
        group = RolloutGroup.decode(bytes(encoded[:cut] if data.draw(st.booleans()) else encoded))
    except ValueError:
        return
    assert group.completion_lengths.sum() == group.completion_ids.size == group.rollout_logprobs.size


@given(st.binary(max_size=200))
def test_foreign_bytes_give_a_value_error(data):
    with pytest.raises(ValueError, match="rollout group"):
        RolloutGroup.decode(data)


def test_another_format_version_is_refused_by_its_number():
    encoded = bytearray(make_group().encode())
    encoded[7] = 9
    with pytest.raises(ValueError, match="format 9"):
        RolloutGroup.decode(bytes(encoded))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"completion_lengths": [1, 1]}, "sum to the 3 tokens"),
        ({"completion_lengths": [4, -1]}, "non-negative"),
        ({"completion_lengths": []}, "at least one completion"),
        ({"rollout_logprobs": [0.0]}, "rollout_logprobs has 1 entries, not T = 3"),
        ({"rewards": [1.0, 2.0, 3.0]}, "rewards has 3 entries, not G = 2"),
        ({"advantages": [[1.0, 2.0]]}, "one-dimensional"),
        ({"loss_mask": [True]}, "loss_mask has 1 entries"),
        ({"finish_reasons": ("stop",)}, "finish_reasons has 1"),
        ({"prompt_ids": [2**40]}, "outside int32"),
        ({"completion_ids": [1.5, 2.0, 3.0]}, "must hold int32"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [1.0, 2.0]}, "prompt_ids must hold int32, not float64"),
        ({"completion_ids": [1, -2, 3]}, "completion_ids holds -2: token ids are not negative"),
        ({"advantages": [1.0, math.nan]}, r"advantages \[1.0, nan\] must be finite"),
        ({"rewards": [1.0, math.inf]}, r"rewards \[1.0, inf\] must be finite"),
        ({"advantages": [math.inf, 0.0]}, "must be finite"),
        ({"advantages": [1.0, -1e30]}, r"advantages holds 1e\+30: no trainer can use a value beyond ±1e\+09"),
        ({"rewards": [3e38, 0.0]}, r"rewards holds 3e\+38: no trainer"),
        ({"sampling": {"temperature": 1e-30}}, r"temperature 1e-30, not one from 0.001 to 1000 \(0: greedy\)"),
        ({"sampling": {"temperature": 1e30}}, r"temperature 1e\+30"),
        ({"sampling": {"temperature": math.nan}}, "temperature nan"),
        ({"rollout_logprobs": [0.0, 0.5, math.nan]}, "rollout_logprobs holds 0.5: a log-probability is not above 0"),
        ({"policy_version": 1.5}, "policy_version must be an integer"),
        ({"policy_version": None}, "policy_version must be an integer, not None"),
        ({"policy_version_end": True}, "policy_version_end must be an integer, not True"),
        ({"prompt_id": 7}, "prompt_id must be a string, not 7"),
        ({"meta": 3}, "meta must be a dict, not 3"),
        ({"sampling": ["top_p"]}, "sampling must be a dict"),
        ({"extras": {"names": np.array(["a"])}}, "dtype <U1"),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_name(fields, words):
    valid = {
        "prompt_ids": [1, 2],
        "completion_ids": [1, 2, 3],
        "completion_lengths": [1, 2],
        "rollout_logprobs": [0.0, 0.0, 0.0],
        "rewards": [1.0, 0.0],
        "advantages": [1.0, -1.0],
    }
    RolloutGroup(**valid)
    with pytest.raises(ValueError, match=words):
        RolloutGroup(**(valid | fields))


def test_what_no_trainer_can_use_is_refused_when_made_and_still_decodes():
    RolloutGroup.decode(make_group(sampling={"temperature": 0}).encode())  # greedy, for an evaluation
    valid = {"prompt_ids": [1], "completions": [[2, 3], []], "logprobs": [[-0.5, math.nan], []], "rewards": [1, 0]}
    group = group_from_completions(**valid, advantages=[1.0, -1.0])
    with pytest.raises(ValueError, match="completions must hold int32, not float64"):
        group_from_completions(**(valid | {"completions": [[2.5, 3], []]}), advantages=[1.0, -1.0])
    with pytest.raises(ValueError, match="prompt_ids must hold int32, not float64"):
        group_from_completions(**(valid | {"prompt_ids": [1.5]}), advantages=[1.0, -1.0])
    with pytest.raises(ValueError, match="must be finite"):
        group_from_completions(**valid, advantages=[math.nan, 0.0])
    group.advantages[0] = math.nan  # as somebody else's writer may store it: tools must be able to show it
    assert RolloutGroup.decode(group.encode()) == group


def test_a_header_with_a_version_or_facts_of_another_type_is_refused_when_decoding():
    encoded = make_group(version=3).encode()
    for right, wrong in ((b"policy_version\x03", b"policy_version\xc0"), (b"meta\x80", b"meta\xc0")):
        assert encoded.count(right) == 1
        with pytest.raises(ValueError, match=r"damaged rollout group: .* must be"):
            RolloutGroup.decode(encoded.replace(right, wrong))


def test_meta_that_msgpack_cannot_hold_is_refused_when_encoding():
    with pytest.raises(ValueError, match="msgpack"):
        make_group(meta={"model": object()}).encode()


def test_small_fields_that_are_not_small_are_refused_when_encoding_and_when_decoding():
    make_group(meta={"text": "x" * 1_000_000}).encode()
    with pytest.raises(ValueError, match="put large values into extras"):
        make_group(meta={"text": "x" * 5_000_000}).encode()
    header = bytes(5_000_000)
    with pytest.raises(ValueError, match="header of 5000000 bytes"):
        RolloutGroup.decode(MAGIC + len(header).to_bytes(8, "little") + header)


def test_completions_and_their_logprobs_are_views_of_the_groups_arrays():
    group = make_group(lengths=(3, 0, 2))
    assert [logprobs.size for logprobs in group.completion_logprobs()] == [3, 0, 2]
    assert np.concatenate(group.completion_logprobs()).tolist() == group.rollout_logprobs.tolist()
    for views, array in (
        (group.completions(), group.completion_ids),
        (group.completion_logprobs(), group.rollout_logprobs),
    ):
        assert all(np.shares_memory(view, array) for view in (views[0], views[2]))
    with pytest.raises(ValueError, match="read-only"):
        RolloutGroup.decode(group.encode()).completion_logprobs()[0][0] = 0.0
