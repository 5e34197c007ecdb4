"""Strategies of the model: the configurations of tables, and what operations are called with."""

import math

from hypothesis import strategies as st

names = st.sampled_from("abc")
selectors = st.one_of(
    st.sampled_from(["fifo", "lifo", "uniform", "min_heap", "max_heap"]),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]).map(lambda exponent: {"type": "prioritized", "exponent": exponent}),
)
limiters = st.one_of(
    st.integers(1, 3).map(lambda n: {"type": "min_size", "min_size": n}),
    st.integers(1, 5).map(lambda n: {"type": "queue", "max_size": n}),
    st.integers(1, 5).map(lambda n: {"type": "stack", "max_size": n}),
    st.builds(
        lambda spi, min_size, error: {
            "type": "sample_to_insert_ratio",
            "samples_per_insert": spi,
            "min_size": min_size,
            "error_buffer": error * max(1.0, spi),
        },
        st.sampled_from([0.5, 1.0, 2.0]),
        st.integers(1, 3),
        st.sampled_from([1.0, 1.5, 4.0]),
    ),
)
limits = {
    "sampler": selectors,
    "remover": selectors,
    "max_size": st.integers(3, 8),
    "max_bytes": st.sampled_from([None, 450, 1200]),
    "max_times_sampled": st.integers(0, 3),
    "rate_limiter": limiters,
    "max_staleness": st.sampled_from([None, 0, 1, 2]),
    "when_full": st.sampled_from(["evict", "block", "reject"]),
    "index": st.sampled_from([[], ["level"], ["environment", "teacher"]]),
    "balance": st.sampled_from(
        [
            None,
            {"tag": "environment"},
            {"tag": "environment", "weights": {"math": 3.0, "code": 0.0}},
            {"tag": "level", "weights": {"1": 2.5, "": 0.5}},
        ]
    ),
    "requires": st.sampled_from([[], ["teacher"], ["images", "teacher"]]),
}


def without_balance_of_a_queue(config):
    is_queue = config.get("rate_limiter", {}).get("type") in ("queue", "stack")
    return {name: value for name, value in config.items() if not (is_queue and name == "balance")}


anything = st.fixed_dictionaries({"seed": st.just(1)}, optional=limits).map(without_balance_of_a_queue)
# What most runs have, and what chance alone seldom puts together: a queue whose items grow too old.
ageing_queue = st.fixed_dictionaries(
    {
        "seed": st.just(1),
        "rate_limiter": st.integers(2, 5).map(lambda n: {"type": "queue", "max_size": n}),
        "max_staleness": st.sampled_from([0, 1, 2]),
    },
    optional={name: limits[name] for name in ("max_bytes", "when_full", "requires")},
)
# With it some runs can go back to an older state.
retaining_queue = st.fixed_dictionaries(
    {
        "seed": st.just(1),
        "rate_limiter": st.integers(2, 5).map(lambda n: {"type": "queue", "max_size": n}),
        "retain_consumed": st.integers(1, 3),
    },
    optional={name: limits[name] for name in ("max_bytes", "when_full", "requires", "index")},
)
tables = anything | ageing_queue | retaining_queue
forwards = st.sampled_from([{}, {"a": "b"}, {"a": "b", "b": "c"}, {"a": "c", "b": "c"}])
priorities = st.sampled_from([0.0, 1e-6, 0.5, 1.0, 1.0, 2.0, 1e6])
timeouts = st.sampled_from([0.0, 1.0, 3.0, math.inf])
picks = st.integers(0, 2**16)
