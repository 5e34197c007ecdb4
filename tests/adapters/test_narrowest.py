"""The dtype of a column, and the log-probabilities that an array holds exactly."""

from types import SimpleNamespace

import numpy as np
import pytest

from replay_adapters.samples import _Row, narrowest


@pytest.mark.parametrize(
    ("arrays", "dtype"),
    [
        ([np.array([1], np.uint64), np.array([-(2**53) - 1])], np.int64),
        ([np.array([2**63 + 1], np.uint64)], np.uint64),
        ([np.array([2**63 + 1], np.uint64), np.array([3])], np.uint64),
        ([np.array([0.5]), np.array([3])], np.float32),
        ([np.array([0.1]), np.array([3])], np.float64),
        ([np.array([1], np.uint64), np.array([-1])], np.int32),
    ],
)
def test_the_narrowest_dtype_holds_all_numbers_exactly(arrays, dtype):
    assert narrowest(arrays) == dtype
    for array in arrays:
        assert array.astype(narrowest(arrays)).tolist() == array.tolist()


@pytest.mark.parametrize("others", [np.array([-1]), np.array([0.5])])
def test_no_dtype_is_chosen_where_none_holds_all_numbers(others):
    assert narrowest([np.array([2**63 + 1], np.uint64), others]) is None


@pytest.mark.parametrize(("logprobs", "is_exact"), [([-0.5, 0.0], True), ([-0.5, 0], False)])
def test_whole_numbers_among_log_probabilities_are_not_exact(logprobs, is_exact):
    sample = SimpleNamespace(
        tokens=[1, 2, 3], response_length=2, rollout_log_probs=logprobs, loss_mask=[1, 1], remove_sample=False
    )
    assert ("rollout_log_probs" in _Row.of(sample).exact) is is_exact
