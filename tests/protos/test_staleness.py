"""Staleness: the formula against a simulation of generators, queue and trainer, with the meter that the server has."""

from __future__ import annotations

import heapq
import itertools
import json
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest

from replay_protos import replay_pb2 as pb
from replay_protos.staleness import FreshFlow, fresh_flow
from replay_server.tables.meters import FlowMeter


@dataclass(frozen=True)
class Rig:
    """Generators with C slots in all, a queue of K, and a trainer of B groups a step that draws P batches ahead."""

    slots: int
    queue: int
    batch: int
    generating: float
    """Seconds for a group, in the mean."""
    step: float
    """Seconds for a step, in the mean."""
    prefetch: int = 0
    admitted: int | None = None
    """max_staleness of [admission]."""
    lag: float = 0.0
    """Seconds until generators have the weights of a version."""


def simulate(rig: Rig, versions: int, seed: int = 0) -> pb.Flow:
    """The flow over so many versions, as the server's meter sees it. Times are exponential, or twice as variable."""
    rng = np.random.default_rng(seed)
    meter = FlowMeter(versions)  # the whole run, not its end
    clock, version, known = 0.0, 0, 0
    events: list[tuple[float, int, str, int]] = []
    order = itertools.count()
    waiting: deque[int] = deque()
    blocked: deque[int] = deque()
    free, accepted, running, ahead, busy = rig.slots, 0, 0, 0, False

    def at(seconds: float, what: str, value: int = 0) -> None:
        heapq.heappush(events, (clock + seconds, next(order), what, value))

    def progress() -> None:
        nonlocal free, accepted, running, ahead, busy
        moved = True
        while moved:
            moved = False
            while blocked and len(waiting) < rig.queue:
                waiting.append(blocked.popleft())
                accepted, running, free, moved = accepted + 1, running - 1, free + 1, True
            if ahead <= rig.prefetch - busy and len(waiting) >= rig.batch:
                drawn = np.array([version - waiting.popleft() for _ in range(rig.batch)])
                meter.draw(drawn)
                ahead, moved = ahead + 1, True
            if not busy and ahead:
                ahead, busy, moved = ahead - 1, True, True
                at(rng.exponential(rig.step), "trained")
            bound = float("inf") if rig.admitted is None else (rig.admitted + version + 1) * rig.batch
            while free and accepted + running < bound:
                free, running, moved = free - 1, running + 1, True
                at(rng.lognormal(0, 1) * rig.generating / np.exp(0.5), "made", known)

    meter.move(-1, 0, 0)
    progress()
    while version < versions:
        clock, _, what, value = heapq.heappop(events)
        if what == "made":
            blocked.append(value)
        elif what == "loaded":
            known = value
        else:
            version, busy = version + 1, False
            meter.move(1, len(waiting), running)
            if rig.lag:
                at(rig.lag, "loaded", version)
            else:
                known = version
        progress()
    return pb.Flow(**vars(meter.measured()))


def flow_of(rig: Rig, flow: pb.Flow) -> FreshFlow:
    """What the client makes of the answer of a server with these settings."""
    settings = {"part": '"generator"', "max_concurrent_groups": str(rig.slots), "tables": '["rollouts"]'}
    config = {"rate_limiter": {"max_size": rig.queue}}
    table = pb.TableInfo(name="rollouts", config=json.dumps(config), flow=flow)
    admission = None
    if rig.admitted is not None:
        admission = pb.AdmissionInfo(groups_per_step=rig.batch, max_staleness=rig.admitted, table="rollouts")
    generator = pb.ClientInfo(name="g", role="generator", open=1, settings=json.dumps(settings))
    found, missing = fresh_flow(pb.ServerInfo(admission=admission, clients=[generator], long_wait=20.0), table)
    assert found is not None, missing
    return found


RIGS = {
    "generators wait": Rig(slots=8, queue=16, batch=4, generating=1.0, step=5.0),
    "generators wait, batches drawn ahead": Rig(slots=8, queue=16, batch=4, generating=1.0, step=5.0, prefetch=2),
    "the trainer waits": Rig(slots=8, queue=16, batch=4, generating=4.0, step=0.1),
    "the trainer waits, batches drawn ahead": Rig(slots=8, queue=16, batch=4, generating=4.0, step=0.1, prefetch=1),
    "both wait at times": Rig(slots=8, queue=16, batch=4, generating=2.0, step=1.0),
    "permits": Rig(slots=16, queue=16, batch=4, generating=2.0, step=1.0, admitted=1),
    "permits, and the trainer is slow": Rig(slots=16, queue=16, batch=4, generating=1.0, step=9.0, admitted=3),
    "a large batch": Rig(slots=4, queue=64, batch=32, generating=1.0, step=4.0),
}
VERSIONS = 2000


@pytest.mark.parametrize("name", RIGS)
def test_the_measured_staleness_is_the_one_that_the_flow_predicts(name):
    rig = RIGS[name]
    flow = flow_of(rig, simulate(rig, VERSIONS))
    # Pairs of a group and a version that one side of the count lacks: those of groups that are not drawn at the end.
    # Without permits every slot counts as under way, and each always is.
    undrawn = rig.slots + rig.queue
    edge = undrawn * (undrawn / rig.batch + 2) / (rig.batch * VERSIONS) * 4
    assert flow.measured == pytest.approx(flow.expected, abs=edge)
    assert flow.measured > 0.05
    assert flow.most is not None
    assert flow.expected <= flow.most + edge


def test_where_generators_always_wait_the_mean_is_the_largest_that_the_settings_allow():
    for name in ("generators wait", "generators wait, batches drawn ahead"):
        flow = flow_of(RIGS[name], simulate(RIGS[name], VERSIONS))
        assert flow.most == pytest.approx((8 + 16) / 4, rel=0.01)
        assert flow.measured == pytest.approx(flow.most, rel=0.05)


def test_where_the_trainer_waits_the_queue_has_what_came_while_it_computed():
    rig = RIGS["the trainer waits"]
    flow = flow_of(rig, simulate(rig, VERSIONS))
    share = rig.step * rig.slots / rig.generating / rig.batch  # of its time in which it computes
    assert flow.expected == pytest.approx(rig.slots / rig.batch + share, abs=0.1)


def test_old_weights_make_draws_older_than_expected_by_their_lag():
    rig = Rig(slots=8, queue=16, batch=4, generating=1.0, step=5.0, lag=4.0)
    flow = flow_of(rig, simulate(rig, VERSIONS))
    # Groups begin when a batch is drawn, which is just after a version is set: that one is missing, and those that are
    # set in 4 s, of which a step takes 5.
    assert flow.measured - flow.expected == pytest.approx(1 + 4 / 5, abs=0.2)


@pytest.mark.parametrize("bound", [0, 1, 2, 4, 5.9])
def test_each_change_that_is_named_keeps_the_mean_within_the_bound(bound):
    rig = RIGS["generators wait"]
    flow = flow_of(rig, simulate(rig, 200))
    said = flow.changes(bound)
    assert said[0] == f"[admission] max_staleness = {int(bound)}"
    for change in said[1:]:
        number = int("".join(each for each in change.partition("(")[0] if each.isdigit()))
        slots, queue, batch = rig.slots, rig.queue, rig.batch
        if "queue" in change:
            queue = number
        elif "fresh groups a step" in change:
            batch = number
        else:
            slots = number
        assert (slots + queue) / batch <= bound
    if bound:
        assert any("fresh groups a step" in change for change in said)


def test_a_bound_that_is_kept_needs_no_change():
    rig = RIGS["permits"]
    flow = flow_of(rig, simulate(rig, 200))
    assert flow.most == 1
    assert flow.changes(1) == []
    assert flow.changes(6) == []
    assert flow.changes(0)


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (None, "no generator is there that says"),
        (pb.ClientInfo(name="mine", role="generator", open=1), "generator mine does not say"),
        (pb.ClientInfo(name="killed", role="generator", age=60.0), "no generator is there that says"),
        (
            pb.ClientInfo(name="odd", role="generator", age=1.0, settings='{"tables": "7"}'),
            "generator odd does not say",
        ),
    ],
    ids=["nobody", "one of one's own", "one that was killed", "one that says nonsense"],
)
def test_what_is_missing_is_named_and_nothing_is_guessed(client: pb.ClientInfo | None, words: str):
    flow = pb.Flow(versions=8, drawn=4, waiting=2, staleness=1)
    table = pb.TableInfo(name="rollouts", config='{"rate_limiter": {"max_size": 4}}', flow=flow)
    found, missing = fresh_flow(pb.ServerInfo(clients=[] if client is None else [client], long_wait=20.0), table)
    assert found is None
    assert words in missing
    assert "max_concurrent_groups" in missing
