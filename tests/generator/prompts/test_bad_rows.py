"""Rows that are no prompts: they end no generator of a table, and under "skip" no other one."""

import pytest

from replay_client.errors import ReplayError
from replay_generator import GeneratorConfig, PromptError, RolloutGenerator
from replay_generator.prompts.prompt import cycle_prompts, load_prompts
from replay_generator.testing import ScriptedEngine
from replay_server import TableConfig
from tests.kit.generators import by_length
from tests.kit.processes import run_replay
from tests.kit.prompts import CURRICULUM, EPOCH, made, make_epoch
from tests.kit.servers import async_serving

BAD = [None, "", [], float("nan"), "\ud800", [{"role": "user", "content": [{"type": "image_url"}]}]]
GOOD = [{"prompt": f"{index}+1=", "prompt_id": f"p{index}"} for index in range(6)]


def among(bad):
    return [*GOOD[:1], {"prompt": bad}, *GOOD[1:]]


@pytest.mark.parametrize("bad", BAD, ids=lambda each: f"{each!a}"[:12])
async def test_a_bad_row_does_not_end_a_generator_of_a_table(bad, caplog):
    async with async_serving(EPOCH) as client:
        generator = make_epoch(client, among(bad))
        await generator.run()
        assert sorted(await made(client)) == [row["prompt_id"] for row in GOOD]
        assert generator.stats["groups_skipped"] == 1
        assert "left out of table 'prompts': row 2 (index 1) of the prompts: " in caplog.text


@pytest.mark.parametrize("row", [{"prompt": "a", "prompt_id": "\ud800"}, {"prompt": "a", "thing": object()}])
async def test_a_row_that_no_table_can_hold_does_not_end_a_generator_of_it(row):
    async with async_serving(EPOCH) as client:
        await make_epoch(client, [row, *GOOD]).run()
        assert sorted(await made(client)) == [each["prompt_id"] for each in GOOD]


@pytest.mark.parametrize("at", [0, 3, 6])
async def test_rows_that_are_too_large_for_the_server_do_not_end_a_generator_of_a_table(at, caplog):
    large = {"prompt": "a", "more": "x" * 200_000}
    prompts = TableConfig(name="prompts", sampler="fifo", max_times_sampled=1, max_bytes=100_000)
    async with async_serving([prompts, TableConfig(name="rollouts")]) as client:
        generator = make_epoch(client, [*GOOD[:at], large, *GOOD[at:], large])
        await generator.run()
        assert sorted(await made(client)) == [row["prompt_id"] for row in GOOD]
        assert generator.stats["groups_skipped"] == 2
        assert f"row {at + 1} (index {at}) of the prompts: the prompt cannot be stored in a table: " in caplog.text


async def test_a_bad_row_among_those_that_a_program_gives_is_skipped_by_its_number(caplog):
    settings = GeneratorConfig(group_size=2, on_prompt_error="skip")
    async with async_serving(EPOCH) as client:
        generator = RolloutGenerator(client, ScriptedEngine(), [*among(None), None, *GOOD], by_length, settings)
        await generator.run()
        assert len(await made(client)) == 2 * len(GOOD)
        assert "prompt 2 of those that are given: 'prompt' must be a text or a list of messages" in caplog.text
        assert "prompt 8 of those that are given: 'prompt' must be a text or a list of messages" in caplog.text


async def test_a_bad_row_does_not_end_a_curriculum():
    async with async_serving(CURRICULUM) as client:
        generator = make_epoch(client, among(None), prompts_mode="curriculum", prompts_epochs=None, max_groups=12)
        await generator.run()
        assert {*await made(client)} <= {row["prompt_id"] for row in GOOD}


@pytest.mark.parametrize("on_prompt_error", ["raise", "skip"])
async def test_rows_of_which_none_is_a_prompt_end_the_run(on_prompt_error):
    async with async_serving(EPOCH) as client:
        with pytest.raises(ReplayError, match=r"5 rows in a row are no prompts, the last because of: row \d"):
            await make_epoch(client, [{"prompt": None}] * 5, on_prompt_error=on_prompt_error).run()


def run_of(client, rows, **config):
    settings = GeneratorConfig(group_size=2, max_concurrent_groups=2, **config)
    return RolloutGenerator(client, ScriptedEngine(), cycle_prompts(rows, epochs=1), by_length, settings)


@pytest.mark.parametrize("bad", BAD, ids=lambda each: f"{each!a}"[:12])
async def test_a_bad_row_is_skipped_where_the_generator_skips(bad):
    async with async_serving(EPOCH) as client:
        generator = run_of(client, among(bad), on_prompt_error="skip")
        await generator.run()
        assert sorted(await made(client)) == [row["prompt_id"] for row in GOOD]
        assert generator.stats["groups_skipped"] == 1


async def test_a_bad_row_ends_a_generator_that_does_not_skip_with_its_number():
    async with async_serving(EPOCH) as client:
        with pytest.raises(PromptError, match=r"row 2 \(index 1\) of the prompts: 'prompt' must be a text"):
            await run_of(client, among(None)).run()


async def test_bad_rows_of_a_data_set_are_skipped_by_their_number(tmp_path, caplog):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(among(None)).save_to_disk(tmp_path)
    async with async_serving(EPOCH) as client:
        await run_of(client, load_prompts(str(tmp_path)), on_prompt_error="skip").run()
        assert sorted(await made(client)) == [row["prompt_id"] for row in GOOD]
        assert f"skipped: {tmp_path}, row 2 (index 1): 'prompt' must be a text" in caplog.text


def test_replay_generate_ends_at_once_for_a_bad_line_unless_it_skips(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": ""}\n')
    command = ["generate", "--model", str(tmp_path), "--prompts", str(path), "--reward", "exact_match"]
    done = run_replay(*command)
    assert done.returncode == 1
    assert "a.jsonl, line 1: 'prompt' must be a text" in done.stderr
    skips = run_replay(*command, "--engine", "none", "--set", "on_prompt_error=skip")
    assert "--engine must be vllm" in skips.stderr  # it has come so far
