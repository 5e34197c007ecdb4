"""The generator against a real server: permits, refusals and restarts."""

import asyncio
import logging
import tempfile
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from replay_client import AsyncReplayClient
from replay_client.errors import ServerUnavailableError
from replay_client.records import read_described
from replay_client.testing import async_until
from replay_client.waits import WaitLog
from replay_generator import StaleWeightsError
from replay_generator.engines.weights import model_facts
from replay_generator.testing import ScriptedEngine
from replay_server import TableConfig
from tests.kit.clocks import turns
from tests.kit.processes import free_port, server_process
from tests.kit.stack import Stack

TABLES = [
    TableConfig(name="rollouts", sampler="fifo", max_staleness=2),
    TableConfig(name="large", sampler="fifo", max_size=1000, when_full="reject"),
]


@pytest.fixture
def make_stack(make_stack):
    return partial(make_stack, tables=TABLES)


FATES = ("insert", "filter", "fail", "stale", "fail to tokenize")


@pytest.mark.parametrize("partial_groups", [None, "partial_groups"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=24))
def test_every_permit_is_used_by_an_insert_or_given_back(partial_groups, fates):
    def reward(row: Any, text: str) -> float:
        return float("nan") if row["fate"] == "fail" else float(len(text))

    class Dated(ScriptedEngine):
        async def generate(self, prompt_ids: Any, *args: Any) -> Any:
            drawn = await super().generate(prompt_ids, *args)
            version = 0 if fates[prompt_ids[0]] == "stale" else 5
            for each in drawn:
                each.policy_versions[:] = [version] * len(each.token_ids)
            return drawn

    class ByFate:
        def encode(self, text: str) -> list[int]:
            return [] if text.endswith("fail to tokenize") else [int(text.split()[0])]

    async def run(weights: str) -> None:
        prompts = [{"prompt": f"{index} {fate}", "fate": fate, "prompt_id": fate} for index, fate in enumerate(fates)]
        async with Stack(
            tables=TABLES, groups=3, permit_tables=partial_groups, admission={"max_staleness": 7}
        ) as stack:
            await stack.client.set_policy_version(5, weights=weights, rollback=True)
            generator = await stack.generate(
                engine=Dated(tokenizer=ByFate()),
                prompts=prompts,
                reward=reward,
                group_filter=lambda group: group.prompt_id != "filter",
                on_prompt_error="skip",
                max_concurrent_groups=None,
                partial_groups_table=partial_groups,
            )
            await generator.task
            stats = generator.stats
            counts = await stack.counts()
            assert stats["groups"] == await stack.holds() == fates.count("insert")
        assert stats["groups_filtered"] == fates.count("filter")
        assert stats["groups_refused_stale"] == fates.count("stale")
        assert stats["groups_skipped"] == fates.count("fail") + fates.count("fail to tokenize")
        assert counts.running == 0
        assert counts.accepted == 5 * 3 + fates.count("insert")  # the server counts from the version on
        assert counts.expired == 0

    with tempfile.TemporaryDirectory() as weights:
        asyncio.run(run(weights))


async def test_as_many_groups_are_under_way_as_there_are_permits(make_stack):
    engine = ScriptedEngine(hold=asyncio.Event())
    stack = await make_stack(groups=3, admission={"max_staleness": 1})
    await stack.generate(engine=engine, max_concurrent_groups=None)
    await async_until(lambda: engine.generating == 6)
    await stack.permit_is_awaited()  # the seventh
    assert engine.most_generating == 6
    await stack.at(1)
    await async_until(lambda: engine.generating == 9)


async def test_a_group_that_takes_longer_than_its_permit_lives_is_inserted_and_counted(make_stack, caplog):
    engine = ScriptedEngine(hold=asyncio.Event())
    with caplog.at_level(logging.WARNING):
        stack = await make_stack(groups=2, admission={"permit_ttl": 0.2})
        generator = await stack.generate(engine=engine, max_groups=3)
        # The server believes one of the first two dead, and lets the third begin.
        await async_until(lambda: engine.generating == 3)
        await asyncio.sleep(0.3)  # by the generator's clock, too, all three permits have expired
        engine.release()
        await generator.task
    assert generator.stats["groups"] == 3
    assert await stack.holds() == 3
    assert generator.stats["permits_expired"] == 3
    counts = await stack.counts()
    assert counts.accepted == 3
    assert counts.running == 0
    assert counts.expired >= 1
    assert sum("raise permit_ttl" in record.message for record in caplog.records) == 1


async def test_a_generator_whose_groups_are_all_too_old_waits_for_newer_weights_and_says_so(stack, tmp_path, caplog):
    engine, score = ScriptedEngine(), asyncio.Event()
    score.set()
    scoring: set[str] = set()

    async def reward(row: Any, text: str) -> float:
        scoring.add(row["prompt_id"])
        await score.wait()
        scoring.discard(row["prompt_id"])
        return float(len(text))

    generator = await stack.generate(engine=engine, reward=reward)
    await generator.counted("groups", 4)
    score.clear()
    await async_until(lambda: len(scoring) == 4)
    await stack.at(9)
    score.set()
    await async_until(lambda: generator.stats["groups_refused_stale"] and not generator.stats["groups_in_flight"])
    started = len(engine.seeds)
    await turns()
    assert len(engine.seeds) == started
    assert generator.stats["groups_refused_stale"] <= 4  # those that were under way
    await stack.at(10, tmp_path)
    await generator.counted("groups", generator.stats["groups"] + 11)
    assert generator.stats["stale_seconds"] > 0
    assert not generator.task.done()
    (line,) = [message for message in caplog.messages if "too old on arrival" in message]
    assert "item of policy version 0 lags 9 behind the current 9" in line
    (line,) = [message for message in caplog.messages if "waits for newer weights" in message]
    assert "the newest is 9, which was published without weights" in line


@pytest.mark.parametrize(
    ("follow", "why"),
    [(True, "the newest is 9, which was published without weights"), (False, r"does not follow .*\(follow_policy\)")],
)
async def test_a_generator_that_gets_no_newer_weights_ends_with_the_reason(stack, follow, why):
    # Before it begins: what it has heard of the policy when its first group is refused is then known.
    await stack.at(9)
    generator = await stack.generate(stale_timeout=0.2, follow_policy=follow)
    with pytest.raises(StaleWeightsError, match=rf"for 0\.2 s \(stale_timeout\) .*{why}.*raise max_staleness"):
        await asyncio.wait_for(generator.task, 60)


async def test_groups_that_would_be_too_old_are_given_up_and_made_again_with_newer_weights(make_stack, tmp_path):
    engine = ScriptedEngine(hold=asyncio.Event())
    stack = await make_stack(groups=4, admission={"max_staleness": 2})
    generator = await stack.generate(engine=engine, max_groups=5)
    await async_until(lambda: engine.generating == 4)
    await stack.at(2)  # they would be just young enough
    await async_until(lambda: generator.stats["policy_version"] == 0 and engine.generating == 4)
    await stack.at(3, tmp_path)
    # The requests that were under way have ended, or the engine could not have loaded weights.
    await async_until(lambda: engine.version == 3 and engine.generating == 4)
    assert generator.stats["groups_aborted"] == 4
    engine.release()
    await generator.task
    samples = await stack.client.sample("rollouts", 5)
    assert sorted(sample.group.prompt_id for sample in samples) == [f"p{number}" for number in range(5)]
    assert {sample.group.policy_version for sample in samples} == {3}
    assert generator.stats["groups_refused_stale"] == 0
    assert generator.stats["groups"] == 5
    counts = await stack.counts()
    assert counts.running == 0
    assert counts.expired == 0


async def test_a_group_that_is_too_old_twice_is_left_out(stack, tmp_path, caplog):
    engine = ScriptedEngine(hold=asyncio.Event())
    generator = await stack.generate(engine=engine, max_groups=1)
    for version in (3, 6):
        await async_until(lambda: engine.generating == 1)
        await stack.at(version, tmp_path)
        await async_until(lambda version=version: generator.stats["groups_aborted"] == version // 3)
    await generator.task
    assert generator.stats["groups"] == 0
    assert generator.stats["groups_aborted"] == 2
    assert "prompt 'p0': its group was left out, because it was too old twice" in caplog.messages


async def test_the_bound_of_a_table_counts_as_it_is_now(stack, monkeypatch):
    monkeypatch.setattr("replay_generator.groups.inserting.SECONDS_PER_LOOK", 0.05)
    looks, server_info = [], AsyncReplayClient.server_info

    async def counted(*given: Any, **options: Any) -> Any:
        info = await server_info(*given, **options)
        looks.append(info)
        return info

    monkeypatch.setattr(AsyncReplayClient, "server_info", counted)
    engine = ScriptedEngine(hold=asyncio.Event())
    generator = await stack.generate(engine=engine, max_groups=1, stale_timeout=None)
    await async_until(lambda: engine.generating == 1)
    await stack.at(2)
    await stack.client.update_table("rollouts", max_staleness=1)
    await generator.counted("groups_aborted")
    assert generator.stats["groups_aborted"] == 1
    seen = len(looks) + 2  # the first of these may have been under way
    await async_until(lambda: len(looks) >= seen)
    assert engine.generating == 0
    await stack.client.update_table("rollouts", max_staleness=2)
    engine.release()
    await generator.task
    assert generator.stats["groups"] == 1


async def test_a_busy_server_is_waited_for_and_nothing_is_dropped(make_stack, caplog, monkeypatch):
    # A second line would come after half a minute, which this test takes where little of the machine is free.
    monkeypatch.setattr("replay_generator.groups.inserting.WaitLog", partial(WaitLog, every=3600.0))
    stack = await make_stack(options={"max_bytes": 3000})
    generator = await stack.generate(tables=("large",), max_groups=20, on_full="skip")
    await generator.counted("server_refused")
    seen = 0
    while not generator.task.done():
        page = await stack.client.list_items("large")
        seen += (await stack.client.delete("large", [item.key for item in page])).applied
        await asyncio.sleep(0.01)
    await generator.task
    seen += await stack.holds("large")
    assert generator.stats["groups"] == 20
    assert seen == 20
    assert generator.stats["groups_refused_full"] == 0
    assert sum("the server refuses for now" in record.message for record in caplog.records) == 1


def test_a_wait_is_logged_at_once_then_every_half_minute_and_when_it_ends(caplog, monkeypatch):
    log, clock = WaitLog(), [1000.0]
    monkeypatch.setattr("replay_client.waits.time.monotonic", lambda: clock[0])
    for second in range(71):
        clock[0] = 1000.0 + second
        log.wait("busy")
    log.go_on()
    log.go_on()
    log.wait("busy again, within half a minute of the last line")
    assert caplog.messages == [
        "busy",
        "busy (for 30 s now)",
        "busy (for 60 s now)",
        "the generator goes on after 70 s",
    ]


@pytest.mark.parametrize("way", ["kill", pytest.param("terminate", marks=pytest.mark.long)])
async def test_a_server_that_is_restarted_finds_the_generator_going_on(make_stack, tmp_path, way, caplog, monkeypatch):
    monkeypatch.setattr("replay_generator.groups.inserting.SECONDS_PER_LOOK", 1.0)
    monkeypatch.setattr("replay_generator.groups.server.LAST_WORD", 0.1)  # there is no server at its end
    address = f"127.0.0.1:{free_port()}"
    config = "[admission]\nfresh_groups_per_step = 100000\nmax_staleness = 4\n\n"
    config += '[[tables]]\nname = "rollouts"\nsampler = "fifo"\n'
    with server_process(tmp_path, config, address) as server:
        stack = await make_stack(addresses=[address])
        generator = await stack.generate(timeout=20.0, max_concurrent_groups=2)

        async def described() -> list[object]:
            said = (await generator.client.server_info()).clients
            return [read_described(each.settings).get("max_concurrent_groups") for each in said]

        await generator.counted("groups", 6)
        assert await described() == [2]
        getattr(server.process, way)()
        server.process.wait()
        await async_until(
            lambda: "the server does not answer, and the generator tries again" in caplog.text, timeout=90.0
        )
        groups = generator.stats["groups"]
        assert not generator.task.done()
        with server_process(tmp_path, config, address):
            await async_until(lambda: generator.stats["groups"] > groups + 20, timeout=90.0)
            await async_until(lambda: "the server was restarted: it holds " in caplog.text, timeout=90.0)
            async with asyncio.timeout(90.0):
                while await described() != [2]:
                    await asyncio.sleep(0.01)
        assert not generator.task.done()
        await generator.stop()


async def test_a_server_that_stays_away_ends_the_run_after_the_clients_timeout(make_stack, tmp_path):
    with server_process(tmp_path) as server:
        stack = await make_stack(addresses=[server.address])
        generator = await stack.generate(timeout=1.0)
        await generator.counted("groups", 6)
        server.kill()
        with pytest.raises(ServerUnavailableError, match=r"tried for 1 s"):
            await asyncio.wait_for(generator.task, 60)


async def test_a_server_that_stays_away_before_there_are_weights_ends_the_run_too(
    make_stack, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("replay_generator.policy.follower.LOG_SECONDS", 0.3)  # the client's timeout is longer
    with server_process(tmp_path) as server:
        stack = await make_stack(addresses=[server.address])
        generator = await stack.generate(timeout=1.0, wait_for_policy=True)
        await async_until(lambda: "waiting until the trainer publishes weights" in caplog.text)
        server.kill()
        with pytest.raises(ServerUnavailableError, match=r"tried for 1 s"):
            await asyncio.wait_for(generator.task, 60)


def test_a_slow_tokenizer_says_the_same_of_itself_as_a_fast_one_and_an_engine_of_ones_own_says_nothing(tmp_path):
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "b", "a"]))
    slow = BertTokenizerLegacy(str(vocabulary))
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordPiece(slow.get_vocab(), unk_token="[UNK]")))
    assert model_facts(None, slow) == {"tokenizer": "f7b06a0da87e2ab6"}
    assert model_facts(None, fast) == {"tokenizer": "f7b06a0da87e2ab6"}
    assert model_facts(None, ScriptedEngine().tokenizer) == {}
    assert model_facts(str(tmp_path), None) == {}
