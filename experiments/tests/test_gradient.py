"""What a step waits for, by a sum that was done by hand."""

import pytest

from experiments.gradient import figures


def test_what_a_step_waits_is_divided_between_generator_reload_buffer_and_publication():
    group = {"finished": 0.0, "scored": 1.0}
    early = {"step": 1, "seconds": 10.0, "replace": 1.0, "publish": 2.0, "asked": 4.0, "taken": 6.0}
    late = {"step": 2, "seconds": 10.0, "replace": 0.0, "publish": 1.0, "asked": 10.0, "taken": 16.0}
    steps = [
        early | {"gradient": 9.0, "groups": [group | {"key": 1}]},
        late | {"gradient": 19.0, "groups": [group | {"key": 2}]},
    ]
    # The second group came while the trainer waited. Of the reloads, only the second is a part of that.
    found = figures(steps, {1: 3.0, 2: 15.0}, [(7.0, 9.0), (11.0, 13.0), (15.5, 17.0)])
    waits = {"generator": 15.0, "reload": 10.0, "buffer": 20.0, "publication": 15.0}
    assert found["percent_of_a_step_waiting_for"] == waits
    assert found["milliseconds"]["reload of a version"]["p50"] == pytest.approx(2_000.0)
    assert found["milliseconds"]["scored to acknowledged"]["p50"] == pytest.approx(8_000.0)
    assert found["milliseconds"]["finished to gradient"]["p50"] == pytest.approx(14_000.0)
