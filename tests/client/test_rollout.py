"""RolloutGroup and its byte format."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_client import RolloutGroup, group_from_completions, group_from_rows
from replay_client.columns import ALIGNMENT, encode_columns
from replay_client.completions import row_of
from replay_client.rollout import MAGIC
from replay_client.testing import make_group


def full_group() -> RolloutGroup:
    return make_group(
        lengths=(4, 0, 1),
        rewards=(0.0, 1.0, 0.0),
        logprobs=(math.nan, -1.0, -1.0, -1.0, -1.0),
        context_lengths=(1, 0, 0),
        policy_version_end=3,
        prompt_id="naïve/7",
        loss_mask=[True, False, True, True, False],
        finish_reasons=("stop", "length", "stop"),
        sampling={"temperature": 0.7, "top_k": 0},
        extras={"reference": np.arange(5, dtype=np.float16), "image": np.zeros((2, 0, 3), np.uint8)},
        meta={"row": 12, "tags": ["a", None]},
    )


def make_trajectories(**fields) -> RolloutGroup:
    """Two rollouts: one of two sequences, the second after a context of its own, and one of one sequence."""
    return RolloutGroup(
        **{
            "prompt_ids": [1, 2],
            "completion_ids": [5, 6, 7, 8, 9, 10],
            "completion_lengths": [2, 3, 1],
            "sequence_counts": [2, 1],
            "context_lengths": [0, 1, 0],
            "rollout_logprobs": [-1, -1, math.nan, -1, -1, -1],
            "rewards": [1.0, 0.0],
            "advantages": [1.0, -1.0],
        }
        | fields
    )


def ragged(*sets) -> dict:
    """Sets of values as the values of all, and offsets."""
    offsets = np.cumsum([0, *map(len, sets)])
    return {"kept": np.array([value for each in sets for value in each], np.int32), "kept/offsets": offsets}


def segment(extras, **axes) -> bytes:
    return b"".join(encode_columns(extras, axes))


def test_arrays_are_aligned_and_decoded_as_views():
    buffer = np.frombuffer(full_group().encode(), dtype=np.uint8)
    decoded = RolloutGroup.decode(memoryview(buffer))
    start = buffer.ctypes.data
    for array in (decoded.prompt_ids, decoded.completion_ids, decoded.rollout_logprobs, decoded.rewards):
        assert (array.ctypes.data - start) % ALIGNMENT == 0
        assert np.shares_memory(array, buffer)
        assert not array.flags.writeable


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
        ({"finish_reasons": [1, 2]}, r"finish_reasons must be a string for each rollout, or None, not \[1, 2\]"),
        ({"finish_reasons": "ab"}, "finish_reasons must be a string for each rollout, or None, not 'ab'"),
        ({"context_lengths": [0]}, "context_lengths has 1 entries, not S = 2"),
        ({"context_lengths": [0, -1]}, r"context_lengths\[1\] is -1, .* from 0 to 2"),
        ({"context_lengths": [0, 3]}, r"context_lengths\[1\] is 3, .* from 0 to 2, the tokens of the sequence"),
        (
            {"context_lengths": [0, 1]},
            "rollout_logprobs holds 0 at token 1, which context_lengths says is context: write NaN there",
        ),
        ({"context_lengths": [0, 1], "prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [2**40]}, "outside int32"),
        ({"completion_ids": [1.5, 2.0, 3.0]}, "must hold int32"),
        ({"completion_ids": [1, -2, 3]}, "completion_ids holds -2: token ids are not negative"),
        ({"advantages": [1.0, math.nan]}, r"advantages \[1.0, nan\] must be finite"),
        ({"rewards": [1.0, math.inf]}, r"rewards \[1.0, inf\] must be finite"),
        ({"advantages": [1.0, -1e30]}, r"advantages holds 1e\+30: no trainer can use a value beyond ±1e\+09"),
        ({"rewards": [3e38, 0.0]}, r"rewards holds 3e\+38: no trainer"),
        ({"sampling": {"temperature": 1e-30}}, r"temperature 1e-30, not one from 0.001 to 1000 \(0: greedy\)"),
        ({"sampling": {"temperature": 1e30}}, r"temperature 1e\+30"),
        ({"sampling": {"temperature": math.nan}}, "temperature nan"),
        ({"rollout_logprobs": [0.0, 0.5, math.nan]}, "rollout_logprobs holds 0.5: a log-probability is not above 0"),
        ({"policy_version": 1.5}, "policy_version must be an integer"),
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


def make_group_with_contexts() -> RolloutGroup:
    """Rows whose prompts are 1 2, 1 2 3 4 and 1 2 5."""
    return group_from_rows(
        prompts=[[1, 2], [1, 2, 3, 4], [1, 2, 5]],
        completions=[[7, 8], [9], []],
        logprobs=[[-1.0, math.nan], [-2.0], []],
        loss_masks=[[True, False], [True], []],
        rewards=[1.0, 0.0, 0.0],
        advantages=[1.0, -1.0, 0.0],
    )


def test_rows_with_prompts_of_their_own_share_the_common_beginning_and_keep_the_rest_as_context():
    group = make_group_with_contexts()
    assert group.prompt_ids.tolist() == [1, 2]
    assert group.completion_ids.tolist() == [7, 8, 3, 4, 9, 5]
    assert group.completion_lengths.tolist() == [2, 3, 1]
    assert group.context_lengths.tolist() == [0, 2, 1]
    np.testing.assert_array_equal(group.rollout_logprobs, np.float32([-1, math.nan, math.nan, math.nan, -2, math.nan]))
    # What was given comes back.
    assert [prompt.tolist() for prompt in group.prompts()] == [[1, 2], [1, 2, 3, 4], [1, 2, 5]]
    assert group.prompt_lengths.tolist() == [2, 4, 3]
    assert [group.completion_ids[span].tolist() for span in group.sampled_spans()] == [[7, 8], [9], []]
    assert group.sampled_lengths.tolist() == [2, 1, 0]
    assert group.trained_mask.tolist() == [True, False, False, False, True, False]
    decoded = RolloutGroup.decode(group.encode())
    assert decoded == group
    assert decoded.context_lengths.tolist() == [0, 2, 1]
    assert decoded != replace(group, context_lengths=None)
    assert decoded != replace(group, context_lengths=[0, 2, 0])


def test_rows_may_be_the_turns_of_a_rollout_with_advantages_for_each_token():
    group = group_from_rows(
        prompts=[[1, 2], [1, 2, 7, 8, 3], [1, 2, 4]],
        completions=[[7, 8], [9], [5]],
        logprobs=[[-1.0, -1.0], [-2.0], [-3.0]],
        token_advantages=[[0.5, 0.5], [2.0], [-1.0]],
        sequence_counts=[2, 1],
        rewards=[1.0, 0.0],
        advantages=[1.0, -1.0],
    )
    assert group.token_advantages.tolist() == [0.5, 0.5, 0, 0, 0, 2, 0, -1]
    assert group.rollout_lengths.tolist() == [3, 1]
    assert [group.token_advantages[span].tolist() for span in group.rollout_spans()] == [
        [0.5, 0.5, 0, 0, 0, 2],
        [0, -1],
    ]


def make_columns() -> dict[str, tuple[str, list[Any]]]:
    """Columns of rows with 2, 4 and 3 tokens of a prompt, and 2, 1 and 0 others. Routing differs from token 1 on."""
    routing = [np.array(row, np.uint8)[:, None] for row in ([9, 8, 7, 6], [9, 1, 2, 3, 4], [9, 8, 5])]
    sets = [([5, 6, 7], [0, 2, 3]), ([8], [0, 1]), ([], [0])]
    ragged = [(np.array(values, np.int32), np.array(offsets, np.int64)) for values, offsets in sets]
    teacher = [np.float32([-1, -2]), np.float32([-3]), np.float32([])]
    return {"routing": ("whole", routing), "sets": ("ragged:token", ragged), "teacher": ("token", teacher)}


def ragged_group(offsets: npt.NDArray[Any]) -> RolloutGroup:
    """A group of two rows with two tokens. The column "sets" of each row has as many values as `offsets` (3,) say."""
    values = np.arange(int(offsets[-1]), dtype=np.int32)
    return group_from_rows(
        prompts=[[1], [1]],
        completions=[[7, 8], [9, 5]],
        logprobs=[[-1.0, -1.0], [-2.0, -2.0]],
        rewards=[1.0, 0.0],
        advantages=[1.0, -1.0],
        columns={"sets": ("ragged:token", [(values, offsets)] * 2)},
    )


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "uint32", "uint64"])
def test_ragged_offsets_of_rows_may_have_any_integer_type(dtype: str):
    group = ragged_group(np.array([0, 2, 3], dtype))
    assert group.extras["sets/offsets"].tolist() == [0, 2, 3, 5, 6]
    assert group.extras["sets/offsets"].dtype == dtype


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_ragged_offsets_that_outgrow_the_type_of_the_rows_get_a_wider_type(dtype: str):
    last = int(np.iinfo(dtype).max)
    group = ragged_group(np.array([0, 27, last], dtype))
    assert group.extras["sets/offsets"].tolist() == [0, 27, last, last + 27, 2 * last]


def test_ragged_offsets_of_rows_that_are_no_integers_are_one_error():
    with pytest.raises(ValueError, match="'sets' with offsets of the type float32: give integers"):
        ragged_group(np.array([0, 2, 3], np.float32))


def test_columns_of_rows_come_back_row_by_row_and_share_a_prompt_only_where_they_agree():
    columns = make_columns()
    group = group_from_rows(
        prompts=[[1, 2], [1, 2, 3, 4], [1, 2, 5]],
        completions=[[7, 8], [9], []],
        logprobs=[[-1.0, -1.0], [-2.0], []],
        rewards=[1.0, 0.0, 0.0],
        advantages=[1.0, -1.0, 0.0],
        columns=columns,
        extras={"image": np.zeros((2, 2))},
    )
    group = RolloutGroup.decode(group.encode())
    assert group.prompt_ids.tolist() == [1], "token 2 was routed differently in the second row"
    assert group.context_lengths.tolist() == [1, 3, 2]
    assert group.axes == {"routing": "whole", "sets": "ragged:token", "teacher": "token"}
    assert group.extras["image"].shape == (2, 2)
    for name, (_, rows) in columns.items():
        for row, expected in enumerate(rows):
            parts = (x if isinstance(x, tuple) else (x,) for x in (row_of(group, name, row), expected))
            for got, part in zip(*parts, strict=True):
                np.testing.assert_array_equal(got, part, strict=True)


def test_a_column_of_another_axis_is_refused_with_the_place_for_it():
    row = {"prompts": [[1]], "completions": [[7]], "logprobs": [[-1.0]], "rewards": [1], "advantages": [1]}
    with pytest.raises(ValueError, match=r"columns has 'x' with the axis 'rollout': put it into extras and axes"):
        group_from_rows(**row, columns={"x": ("rollout", [1])})


def test_a_group_without_contexts_has_the_bytes_that_it_always_had():
    group = group_from_rows(
        prompts=[[1, 2]] * 2, completions=[[7], [8]], logprobs=[[-1.0], [-1.0]], rewards=[1, 0], advantages=[1, -1]
    )
    assert group.context_lengths is None
    assert group.trained_mask.tolist() == [True, True]
    assert hashlib.sha256(group.encode()).hexdigest() == (
        "7011934e560cc94c2d570e73c1c0552e8bd33995f17a5dad9f749fcce38d67eb"
    )


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=5),
    length=st.integers(0, 3),
    policy_version=st.integers(-(2**40), 2**40),
    prompt_id=st.text(max_size=8),
    meta=st.dictionaries(st.text(max_size=4), st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text())),
)
def test_any_prompts_and_facts_come_back_as_they_were(prompts, length, **facts):
    group = group_from_rows(
        prompts=prompts,
        completions=[[9] * length for _ in prompts],
        logprobs=[[-1.0] * length for _ in prompts],
        rewards=[0.0] * len(prompts),
        advantages=[0.0] * len(prompts),
        **facts,
    )
    again = RolloutGroup.decode(group.encode())
    assert again == group
    assert [prompt.tolist() for prompt in again.prompts()] == prompts
    assert all(again.completion_ids[span].tolist() == [9] * length for span in again.sampled_spans())


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


def test_texts_that_are_none_are_refused_when_encoding_and_when_decoding():
    encoded = make_group(prompt_id="p", finish_reasons=("a", "b", "c")).encode()
    for right, wrong in ((b"prompt_id\xa1p", b"prompt_id\x91\x07"), (b"\xa1b", b"\x91\x07")):
        assert encoded.count(right) == 1
        with pytest.raises(ValueError, match=r"damaged rollout group: .* must be a string"):
            RolloutGroup.decode(encoded.replace(right, wrong))
    group = make_group()
    group.finish_reasons = (1, 2, 3)
    with pytest.raises(ValueError, match=r"not \(1, 2, 3\)"):
        group.encode()


def rewritten(group: RolloutGroup, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The bytes of a group whose header has other fields, as a writer in another language may write them."""
    encoded = bytes(group.encode())
    length = int.from_bytes(encoded[8:16], "little")
    header = msgpack.unpackb(encoded[16 : 16 + length])
    change(header["fields"])
    packed = msgpack.packb(header)
    head = encoded[:8] + len(packed).to_bytes(8, "little") + packed
    arrays = encoded[-(-(16 + length) // 64) * 64 :]
    return head.ljust(-(-len(head) // 64) * 64, b"\0") + arrays


def test_bytes_of_another_language_need_no_finish_reasons():
    group = make_group(finish_reasons=None)
    assert RolloutGroup.decode(rewritten(group, lambda fields: fields.pop("finish_reasons"))) == group


def test_a_field_that_there_is_not_is_named_beside_those_that_there_are():
    encoded = rewritten(make_group(), lambda fields: fields.update(colour="red"))
    says = "damaged rollout group: there is no field colour; there are advantages, .*finish_reasons"
    with pytest.raises(ValueError, match=says):
        RolloutGroup.decode(encoded)


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


def test_a_rollout_of_several_sequences_is_one_rollout():
    group = make_trajectories(finish_reasons=("stop", "length"), token_advantages=[1, 1, 0, 2, 2, -1])
    assert group.group_size == 2
    assert group.num_sequences == 3
    assert group.num_tokens == 6
    assert group.sequence_rollouts.tolist() == [0, 0, 1]
    assert [group.completion_ids[span].tolist() for span in group.sequence_spans()] == [[5, 6], [7, 8, 9], [10]]
    assert [prompt.tolist() for prompt in group.prompts()] == [[1, 2], [1, 2, 7], [1, 2]]
    assert RolloutGroup.decode(group.encode()) == group
    assert make_group().sequence_rollouts.tolist() == [0, 1, 2]


def test_each_extra_is_cut_by_its_axis_and_never_by_its_shape():
    same = np.arange(6)  # of the shape (T,), whatever it means
    group = make_trajectories(
        prompt_ids=[1],
        extras={
            "token": same,
            "whole": np.arange(7),
            "sequence": np.array([[10], [11], [12]]),
            "rollout": np.array([20, 21]),
            "said": same,
            "unsaid": same,
            **ragged([1], [2, 3], [], [4], [5, 6], [7]),
        },
        axes={
            **{axis: axis for axis in ("token", "whole", "sequence", "rollout")},
            "said": "group",
            "kept": "ragged:token",
        },
    )
    again = RolloutGroup.decode(group.encode())
    assert again == group
    assert {name: again.extra_of(name, 1).tolist() for name in group.extras if name != "kept/offsets"} == {
        "token": [2, 3, 4],
        "whole": [0, 3, 4, 5],
        "sequence": [11],
        "rollout": 20,
        "said": same.tolist(),
        "unsaid": same.tolist(),
        "kept": [4, 5, 6],
    }
    assert again.offsets_of("kept", 1).tolist() == [0, 0, 1, 3]
    assert again.extra_of("rollout", 2) == 21
    assert replace(again, axes=again.axes | {"said": "token"}) != again


def test_a_tensor_that_numpy_cannot_take_is_refused_with_the_remedy():
    torch = pytest.importorskip("torch")
    for tensor in (torch.zeros(2).bfloat16(), torch.zeros(2, requires_grad=True)):
        with pytest.raises(ValueError, match=r"extras\['image'\] is no array of numpy: .*; of a tensor take x\.detach"):
            make_group(extras={"image": tensor})


TRAJECTORY_MISTAKES = {
    "counts that do not sum": ({"sequence_counts": [1, 1]}, r"sequence_counts \[1, 1\] must be .* sum to the 3 seq"),
    "no sequence": ({"sequence_counts": [3, 0]}, r"sequence_counts \[3, 0\] must be > 0"),
    "negative count": ({"sequence_counts": [4, -1]}, r"sequence_counts \[4, -1\] must be > 0"),
    "a count too many": ({"sequence_counts": [1, 1, 1]}, "sequence_counts has 3 entries, not G = 2"),
    "no counts": ({"sequence_counts": None}, "rewards has 2 entries, not G = 3; sequence_counts says which sequences"),
    "context longer than its sequence": (
        {"context_lengths": [0, 4, 0]},
        r"context_lengths\[1\] is 4, and must be from 0 to 3",
    ),
    "contexts of rollouts": ({"context_lengths": [0, 1]}, "context_lengths has 2 entries, not S = 3"),
    "reasons of sequences": ({"finish_reasons": ("stop",) * 3}, "finish_reasons has 3 entries, not G = 2"),
    "advantages of sequences": ({"advantages": [1.0, 1.0, -1.0]}, "advantages has 3 entries, not G = 2"),
    "too few token advantages": ({"token_advantages": [1.0]}, "token_advantages has 1 entries, not T = 6"),
    "unknown token advantage": (
        {"token_advantages": [1, 1, math.nan, 1, 1, 1]},
        "token_advantages holds nan at token 2, .* write 0 for tokens that are not trained on",
    ),
    "huge token advantage": (
        {"token_advantages": [1, 1, 1, 1, 1, -1e10]},
        r"token_advantages holds -1e\+10 at token 5",
    ),
    "a tool's token that is not masked": (
        {"rollout_logprobs": [-1, -1, math.nan, -1, math.nan, -1]},
        "rollout_logprobs is NaN at token 4, and other trained tokens of sequence 1 .* False into loss_mask",
    ),
    "axis of nothing": ({"axes": {"x": "token"}}, "axes names 'x', which extras does not have: add the array"),
    "no such axis": (
        {"extras": {"x": np.zeros(6)}, "axes": {"x": "tokens"}},
        r"axes\['x'\] is 'tokens', not one of token, whole, sequence, rollout, group, ragged:token",
    ),
    "axes that are no dict": ({"axes": ["token"]}, r"axes must be a dict, not \['token'\]"),
    "extras that are no dict": ({"extras": [np.zeros(6)]}, "extras must be a dict"),
    **{
        f"rows of {axis}": (
            {"extras": {"x": np.zeros((5, 2))}, "axes": {"x": axis}},
            rf"extras\['x'\] has the shape \(5, 2\), and its axis '{axis}' needs {rows} rows",
        )
        for axis, rows in {"token": 6, "whole": 8, "sequence": 3, "rollout": 2}.items()
    },
    "a number without rows": (
        {"extras": {"x": np.float32(1)}, "axes": {"x": "rollout"}},
        r"extras\['x'\] has the shape \(\), and its axis 'rollout' needs 2 rows",
    ),
    "no offsets": (
        {"extras": {"x": np.zeros(6)}, "axes": {"x": "ragged:token"}},
        r"extras\['x'\] has the axis 'ragged:token': put T \+ 1 offsets into extras\['x/offsets'\]",
    ),
    "offsets of nothing": ({"extras": {"x/offsets": np.zeros(7)}}, r"extras\['x/offsets'\] is the name of offsets"),
    "too few offsets": (
        {"extras": {"x": np.zeros(6), "x/offsets": np.arange(6)}, "axes": {"x": "ragged:token"}},
        r"extras\['x/offsets'\] is int64 of the shape \(6,\), and must be integers of the shape \(7,\)",
    ),
    "offsets that end too early": (
        {"extras": {"x": np.zeros(7), "x/offsets": np.arange(7)}, "axes": {"x": "ragged:token"}},
        r"extras\['x/offsets'\] goes from 0 to 6, and must rise from 0 to 7, the rows of its values",
    ),
    "offsets that fall": (
        {"extras": {"x": np.zeros(6), "x/offsets": [0, 3, 2, 3, 4, 5, 6]}, "axes": {"x": "ragged:token"}},
        "must rise from 0",
    ),
}


@pytest.mark.parametrize(("fields", "words"), TRAJECTORY_MISTAKES.values(), ids=TRAJECTORY_MISTAKES)
def test_a_trajectory_that_is_misdescribed_is_refused_with_the_remedy(fields, words):
    with pytest.raises(ValueError, match=words):
        make_trajectories(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout_logprobs": [-1, -1, math.nan, math.nan, math.nan, -1]},
        {
            "rollout_logprobs": [-1, -1, math.nan, -1, math.nan, -1],
            "loss_mask": [True, True, False, True, False, True],
        },
        {
            "rollout_logprobs": [-1, math.nan, -1, -1, -1, -1],
            "sequence_counts": None,
            "context_lengths": None,
            "rewards": [1, 0, 0],
            "advantages": [1, 0, 0],
        },
    ],
    ids=["in all of a sequence", "where masked", "in a completion"],
)
def test_an_unknown_log_probability_is_allowed(fields):
    make_trajectories(**fields)


# ------------------------------------------------------------------------------------------------ segments


def test_columns_that_were_appended_join_the_extras_and_the_first_of_a_name_counts():
    group = make_trajectories(extras={"here": np.arange(6)}, axes={"here": "token"})
    encoded = group.encode()
    later = {"teacher": np.full((6, 2), -1, np.float16), "value": np.zeros(2, ml_dtypes.bfloat16)}
    stored = encoded + segment(later, teacher="token", value="rollout")
    stored += segment({"teacher": np.zeros(3), "here": np.zeros(1), "note": np.uint8(7)})
    stored += segment(ragged([1], [], [2], [], [], []), kept="ragged:token") + segment(ragged([9]), kept="ragged:token")
    assert all(len(each) % ALIGNMENT == 0 for each in (encoded, segment(later)))
    decoded = RolloutGroup.decode(stored)
    extras = {"here": np.arange(6), **later, "note": np.uint8(7), **ragged([1], [], [2], [], [], [])}
    axes = {"here": "token", "teacher": "token", "value": "rollout", "kept": "ragged:token"}
    assert decoded == replace(group, extras=extras, axes=axes)
    assert RolloutGroup.decode(decoded.encode()) == decoded
    assert not decoded.extras["teacher"].flags.writeable


@pytest.mark.parametrize(
    ("appended", "words"),
    [
        (b"\0", r"damaged rollout group: not a segment: 1 bytes"),
        (segment({"x": np.zeros(6)})[:-32], "damaged rollout group: array 'extras/x' lies at 0 to 48"),
        (segment({"x": np.zeros(1)}) + bytes(64), "damaged rollout group: not a segment: "),
        (b"RPLYSEG\x02" + bytes(56), "damaged rollout group: segment of format 2; this version reads 1"),
        (segment({"x": np.zeros(5)}, x="token"), r"damaged rollout group: extras\['x'\] has the shape \(5,\)"),
        (make_group().encode(), "damaged rollout group: not a segment: "),
    ],
    ids=["a byte", "cut off", "zeros after it", "another format", "rows that do not fit", "a group"],
)
def test_damage_behind_a_group_is_refused(appended, words):
    with pytest.raises(ValueError, match=words):
        RolloutGroup.decode(make_trajectories().encode() + appended)
