"""Rules of the page without a browser: the budget, the health of a run, files of metrics, prompts, the command."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from replay_client.errors import DeadlineExceededError, ServerUnavailableError
from replay_client.records import ClientInfo, OverdueClient, Policy, ServerInfo, TableInfo
from replay_client.testing import PATIENCE
from replay_client.trend import Direction, trend_of
from replay_dashboard.budget import DEAREST, FIRST_CALLS, Budget
from replay_dashboard.diagnosis import Finding, Level
from replay_dashboard.facts import Facts, FactsStore
from replay_dashboard.group import TokenText
from replay_dashboard.health import learning, signals, verdict
from replay_dashboard.prompts import PromptLog
from replay_dashboard.training import MOST_POINTS, Runs
from replay_protos import replay_pb2 as pb
from replay_server import ReplayServer, TableConfig
from tests.kit.processes import Running, fails

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "client/replay_dashboard/page"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def spend(budget: Budget, clock: Clock, seconds: float, error: type[Exception] | None = None) -> None:
    async with budget.call():
        clock.now += seconds
        if error is not None:
            raise error("x")


async def test_calls_cost_what_they_took_and_credit_grows_by_its_share():
    clock = Clock()
    budget = Budget(0.01, 0.5, clock=clock)
    await spend(budget, clock, 0.7)
    assert budget.credit == pytest.approx(-0.2 + 0.0, abs=0.01)
    clock.now += 30
    assert budget.credit == pytest.approx(0.1, abs=0.01)
    clock.now += 1000
    assert budget.credit == 0.5
    await spend(budget, clock, 60.0)
    assert budget.credit == pytest.approx(0.5 - DEAREST + 0.6, abs=0.01)  # a minute long it grew


async def test_a_call_waits_for_credit_and_a_background_call_for_half_of_it():
    clock = Clock()
    budget = Budget(0.01, 0.5, clock=clock)
    await spend(budget, clock, 0.4)
    waiting = [asyncio.create_task(hold(budget, background)) for background in (True, False)]
    await asyncio.wait_for(waiting[1], PATIENCE)
    assert not waiting[0].done()
    clock.now += 100
    await asyncio.wait_for(waiting[0], PATIENCE)


async def hold(budget: Budget, background: bool) -> None:
    async with budget.call(background=background):
        pass


async def test_a_server_that_is_away_costs_nothing():
    clock = Clock()
    budget = Budget(0.01, 0.5, clock=clock)
    with pytest.raises(ServerUnavailableError):
        await spend(budget, clock, 3.0, ServerUnavailableError)
    assert budget.credit == 0.5


async def test_of_calls_that_are_alike_the_fastest_is_the_price():
    clock = Clock()
    budget = Budget(0.0, 1.0, alike=True, clock=clock)
    for _ in range(FIRST_CALLS):
        await spend(budget, clock, 0.01)
    for seconds in (0.3, 0.9):
        await spend(budget, clock, seconds)
    assert budget.credit == pytest.approx(1.0 - 3 * 0.01)  # of the last call of the first ones, and of these two


async def test_the_first_calls_that_are_alike_cost_nothing():
    clock = Clock()
    budget = Budget(0.0, 0.1, alike=True, clock=clock)
    for _ in range(FIRST_CALLS - 1):
        await spend(budget, clock, 0.8)
    assert budget.credit == 0.1


async def test_a_call_that_fails_does_not_change_the_price_of_calls_that_are_alike():
    clock = Clock()
    budget = Budget(0.0, 1.0, alike=True, clock=clock)
    for _ in range(FIRST_CALLS):
        await spend(budget, clock, 0.01)
    for _ in range(20):  # more than a budget remembers
        with pytest.raises(DeadlineExceededError):
            await spend(budget, clock, 3.0, DeadlineExceededError)
    assert budget.credit == pytest.approx(1.0 - 21 * 0.01)


# ------------------------------------------------------------------------------------------------ health


def test_a_collapse_is_seen_in_the_entropy_or_without_metrics_in_the_log_probs():
    falling = [0.5] * 10 + [0.4, 0.2, 0.05, 0.01, 0.01, 0.01, 0.01]
    steady = [0.5 - 0.01 * step for step in range(17)]
    rising, flat = [0.38 + 0.026 * step for step in range(17)], [0.4] * 17
    for metrics, versions, level in (
        ({"train/entropy": falling}, [], Level.FAILURE),
        ({"train/entropy": falling, "fresh/reward_mean": flat}, [], Level.FAILURE),
        ({"train/entropy": falling, "fresh/reward_mean": rising}, [], Level.OK),
        ({"train/entropy": falling, "fresh/reward_mean": flat, "eval/pass@8": rising}, [], Level.OK),
        ({}, [{"logprob": -each, "reward": 0.4} for each in falling], Level.FAILURE),
        ({}, [{"logprob": -each, "reward": reward} for each, reward in zip(falling, rising, strict=True)], Level.OK),
    ):
        (sign,) = signals(metrics, versions)
        assert sign.message.startswith("train/entropy fell" if metrics else "mean negative log-prob fell")
        said = verdict(info_of(), [], [sign])
        ends = {Level.FAILURE: "The policy is collapsing", Level.OK: "Healthy"}
        assert sign.level == level
        assert said["headline"] == ends[level]
        assert not said["remedy"].startswith("raise")
    assert signals({"train/entropy": steady}, []) == []
    assert signals({}, [{"logprob": None}] * 30) == []


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("correction/ess", 0.9, 0.1),
        ("correction/kl", 0.01, 0.4),
        ("correction/ratio_mean", 1.0, 3.0),
        ("correction/chi2", 0.5, 2.0),
        ("correction/unknown_masks_fraction", 0.0, 0.5),
        ("fresh/zero_variance_fraction", 0.4, 0.95),
        ("fresh/truncated_fraction", 0.02, 0.5),
        ("replay/groups_missing", 0.0, 2.0),
    ],
)
def test_a_metric_beyond_its_healthy_range_is_a_signal(name, good, bad):
    assert signals({name: [None, good, good, good]}, []) == []
    (signal_,) = signals({name: [good, *[bad] * 10]}, [])
    assert signal_.message.startswith(name)


def test_a_reward_that_falls_and_a_gradient_that_explodes_are_signals():
    assert signals({"fresh/reward_mean": [step / 40 for step in range(40)]}, []) == []
    assert "fell" in signals({"fresh/reward_mean": [0.8] * 20 + [0.3] * 20}, [])[0].message
    assert "went wrong" in signals({"train/grad_norm": [0.5] * 30 + [9.0]}, [])[0].message


def info_of(**fields) -> ServerInfo:
    table = TableInfo(name="rollouts", inserts_per_second=9.0, sample_blocked_share=0.4)
    given = dict.fromkeys(ServerInfo.__dataclass_fields__, 0) | {"policy": Policy(version=3, age=1.0)}
    given |= {"admission": None, "long_wait": 20.0, "overdue": (), "clients": ()}
    return ServerInfo(**given | {"tables": {"rollouts": table}} | fields)


RISING = [0.19 + 0.22 * step / 40 for step in range(41)]
TRAINS = (ClientInfo(name="gpu-1", role="trainer", open=1),)
TRAINED = (ClientInfo(name="gpu-1", role="trainer", ended=True, age=50.0),)
SILENT = OverdueClient(role="trainer", reason="no new policy version since version 29, 94 s ago")
SIGN = Finding("policy", Level.WARNING, "train/grad_norm rose to 9")
COMFORT = Finding("policy", Level.OK, "train/entropy fell, while the reward rose: it learns")
LEARNING = {
    "the reward rises": (RISING, TRAINS, (), [], "ok", "Fresh reward of now: up, from 0.215 to 0.385"),
    "it rises, and a sign says why the entropy falls": (RISING, TRAINS, (), [COMFORT], "ok", "up, from"),
    "it rises, and something is wrong": (RISING, TRAINS, (), [SIGN], "warning", "up, from"),
    "the reward falls from 0.41 to 0.19": (RISING[::-1], TRAINS, (), [], "warning", "down, from 0.385 to 0.215"),
    "the reward is flat": ([0.4] * 40, TRAINS, (), [], "idle", "flat, from 0.4 to 0.4"),
    "it rose until the trainer ended": (RISING, TRAINED, (), [], "idle", "steps. Trainer gpu-1 ended 50 s ago."),
    "it rose until the trainer died": (RISING, TRAINS, (SILENT,), [], "idle", "steps. No new policy version since"),
    "it falls, and the trainer died": (RISING[::-1], TRAINS, (SILENT,), [], "warning", "down, from"),
    "there are few steps": (RISING[:9], TRAINS, (), [], "idle", "now: not known yet: 9 steps have a value"),
    "no step has a reward": ([None] * 40, TRAINS, (), [], "idle", "not known: no step has a value"),
    "the metrics have no reward": ([], TRAINS, (), [], "idle", "not known: no step has a value"),
}


@pytest.mark.parametrize("situation", LEARNING)
def test_it_learns_only_if_the_reward_rises_while_a_trainer_works(situation):
    rewards, clients, overdue, signs, level, words = LEARNING[situation]
    said = learning(trend_of(rewards), "now", info_of(clients=clients, overdue=overdue), signs)
    assert said["level"] == level
    assert words in said["sentence"]


def test_without_metrics_or_a_server_nobody_knows_whether_it_learns():
    none = learning(trend_of([]), "", info_of(clients=TRAINS), [])
    assert none["level"] == "idle"
    assert none["sentence"].startswith("Not known: the page has no metrics of a trainer.")
    away = learning(trend_of(RISING), "now", None, [])
    assert away["level"] == "idle"
    assert away["sentence"].endswith("The server does not answer.")


WARNING = Finding("memory", Level.WARNING, "nothing bounds the bytes", "set max_bytes")


def test_one_sentence_says_how_the_run_is():
    healthy = verdict(info_of(), [], [])
    assert healthy["level"] == "ok"
    assert healthy["headline"] == "Healthy"
    assert healthy["detail"] == "The trainer waits for rollouts 40% of the time: generators set the pace."
    warned = verdict(info_of(), [WARNING], [])
    assert warned["headline"] == "Running, with 1 thing to look at"
    assert warned["remedy"][:7] == "memory:"
    failed = verdict(info_of(), [WARNING, Finding("disk", Level.FAILURE, "it is full", "make room")], [WARNING])
    assert failed["level"] == "failure"
    assert failed["headline"] == "disk: it is full"
    assert failed["remedy"] == "make room"
    gone = verdict(None, [Finding("connection", Level.FAILURE, "no answer", "start it")], [])
    assert gone["headline"] == "The server does not answer"
    assert gone["detail"] == "no answer"


def test_what_stops_the_run_is_told_first_and_a_wait_at_a_table_before_one_for_permits():
    blocked = {"stops": "blocked"}
    permits = Finding("permits", Level.FAILURE, "too far ahead", "train", headline="Generators are blocked", **blocked)
    table = Finding("rollouts", Level.WARNING, "it is full", "start", headline="The trainer is gone", **blocked)
    said = verdict(info_of(), [WARNING, permits, table], [WARNING])
    assert said["level"] == "blocked"
    assert said["headline"] == "The trainer is gone"
    assert said["remedy"] == "start"
    assert verdict(info_of(), [WARNING, permits], [])["headline"] == "Generators are blocked"
    overdue = pb.OverdueClient(
        role="trainer", reason="no new policy version since version 29, for 94 s (usually every 31 s)"
    )
    gone = Finding("trainer", Level.FAILURE, overdue.reason, "again", headline="The trainer is gone", stops="gone")
    said = verdict(info_of(overdue=(overdue,)), [WARNING, gone, permits, table], [])
    assert said["level"] == "failure"
    assert said["headline"] == "The trainer is gone"
    assert said["detail"] == "it is full"
    said = verdict(info_of(overdue=(overdue,)), [WARNING, gone], [])
    assert said["level"] == "failure"
    assert said["headline"] == "The trainer is gone"
    assert said["detail"] == overdue.reason


@pytest.mark.parametrize(
    ("age", "long_wait", "headline"), [(50.0, 20.0, "Healthy"), (500.0, 20.0, "Idle"), (500.0, 900.0, "Healthy")]
)
def test_a_server_that_nobody_uses_is_idle_and_one_with_long_steps_is_not(age, long_wait, headline):
    table = TableInfo(name="rollouts", inserted=pb.ArrivalTimes(age=age), sampled=pb.ArrivalTimes(age=age))
    assert verdict(info_of(tables={"rollouts": table}, long_wait=long_wait), [], [])["headline"] == headline


# ------------------------------------------------------------------------------------------------ files


def line(step: int, **metrics: float) -> str:
    return json.dumps({"step": step, **metrics}) + "\n"


def test_curves_follow_files_that_grow_begin_anew_and_have_damaged_lines(tmp_path):
    runs = Runs(tmp_path)
    path = tmp_path / "a" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text(line(1, loss=1.0) + "not json\n[1]\n" + line(2, loss=2.0, late=5.0) + '{"step": 3, "lo')
    runs.read()
    (curve,) = runs.document([])["curves"]
    assert curve == {"run": "a", "steps": [1, 2], "columns": {"loss": [1.0, 2.0], "late": [None, 5.0]}}
    assert runs.document([])["runs"] == [{"name": "a", "steps": 2, "damaged": 2}]
    with path.open("a") as file:
        file.write('ss": 3.0}\n')
    before = runs.version
    runs.read()
    assert runs.version > before
    assert runs.document(["a"])["curves"][0]["columns"]["loss"] == [1.0, 2.0, 3.0]
    path.write_text(line(1, loss=9.0))
    runs.read()
    assert runs.document(["a"])["curves"][0]["columns"] == {"loss": [9.0]}
    path.unlink()
    runs.read()
    assert runs.document([])["runs"] == []


def test_the_trend_of_a_resumed_run_is_that_of_the_steps_that_are_left(tmp_path):
    path = tmp_path / "metrics.jsonl"
    runs = Runs(tmp_path)

    def write(steps: range, mode: str) -> None:
        with path.open(mode) as file:
            file.write("".join(line(step, **{"fresh/reward_mean": min(step, 60 - step) / 60}) for step in steps))
        runs.read()

    write(range(60), "w")
    assert trend_of(runs.newest()["fresh/reward_mean"]).direction is Direction.FLAT
    write(range(30), "w")
    assert trend_of(runs.newest()["fresh/reward_mean"]).direction is Direction.UP
    assert trend_of(runs.newest()["fresh/reward_mean"]).steps == 30
    write(range(5), "w")
    assert str(trend_of(runs.newest()["fresh/reward_mean"])).startswith("not known yet: 5 steps")
    write(range(5, 40), "a")
    assert trend_of(runs.newest()["fresh/reward_mean"]).steps == 40
    assert runs.newest_name() == tmp_path.name


def test_long_curves_are_thinned_out_and_keep_their_last_point(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(line(step, loss=float(step)) for step in range(1, 4321)))
    runs = Runs(tmp_path)
    runs.read()
    (curve,) = runs.document([])["curves"]
    assert len(curve["steps"]) <= MOST_POINTS
    assert curve["steps"][-1] == 4320
    assert curve["columns"]["loss"][-1] == 4320.0


def test_the_page_says_what_the_metrics_of_a_run_mean():
    meanings = Runs(None).meanings
    assert meanings["fresh/reward_mean"] == "mean reward. The curve to watch."
    assert meanings["correction/ess"].endswith("Unit: share. Healthy: > 0.3.")
    assert "mask_truncated_completions." in meanings["fresh/truncated_fraction"]
    assert "of partial groups that" in meanings["rollouts_stored"]
    for name in ("train/entropy", "replay/staleness_max", "replay/drift_mean", "time/sample", "time/step"):
        assert meanings[name]
    assert meanings["eval/reward_mean"] == meanings["fresh/reward_mean"]
    assert meanings["policy_version"] == "number of the step, and the policy version that it produced."


# ------------------------------------------------------------------------------------------------ what was read


def facts(reward: float, **fields) -> Facts:
    numbers = {"reward_mean": reward, "completions": 4.0, "solved_share": reward, "length_mean": 9.0}
    return Facts(numbers | {"logprob_mean": float("nan")}, **fields)


def test_prompts_remember_groups_that_are_gone_and_how_they_changed():
    log = PromptLog()
    for version, (hard, easy) in enumerate([(0.0, 0.75), (0.0, 1.0), (0.5, 1.0), (0.5, 1.0)]):
        log.add(version, facts(hard, prompt_id="hard", prompt="1 + 1"))
        log.add(version, facts(easy, prompt_id="easy"))
    log.add(9, Facts(flags=frozenset(("damaged",))))
    found = log.document("", "solved", False, 10, {})
    assert [(row["prompt"], row["solved"], row["change"]) for row in found["rows"]] == [
        ("hard", 0.25, 0.5),
        ("easy", 0.9375, 0.125),
    ]
    assert log.document("1 + 1", "", True, 10, {})["matching"] == 1
    assert [(row["version"], row["solved"]) for row in log.by_version()][2:] == [(2, 0.75), (3, 0.75)]
    # A kind of groups for each share of answers that solve: of those between none and all, 0.5 and 0.75 are two.
    assert [row["rates"] for row in log.by_version()][1:3] == [[1, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 0, 0, 1]]
    assert log.by_version()[0]["rates"] == [1, 0, 0, 0, 0, 1, 0, 0]
    with pytest.raises(ValueError, match="sort"):
        log.document("", "nothing", False, 10, {})


def test_slots_of_groups_that_are_gone_are_used_again():
    store = FactsStore()
    for key in range(3000):
        store.put(key, facts(key / 3000, flags=frozenset((f"ended by {key % 80}",))))
    store.keep_only(set(range(1500, 3000)))
    for key in range(3000, 4500):
        store.put(key, facts(1.0))
    assert len(store.rows) == 3000
    assert store.slots_of([0, 1500]).tolist() == [-1, 1500]
    assert store.numbers[store.slots[4499]][0] == 1.0
    assert len(store.names) == 63  # more kinds of finish reasons share the last


def test_a_folder_without_a_tokenizer_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match="save_pretrained"):
        TokenText(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        TokenText(tmp_path)


# ------------------------------------------------------------------------------------------------ the page's files


def test_the_page_parses_no_html_and_asks_no_other_host():
    for path in PAGE.glob("*.js"):
        source = path.read_text()
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
        ):
            assert word not in source, f"{path.name} has {word}"
        hosts = [part.split('"')[0] for part in source.split("http")[1:]]
        assert all(host.startswith("://www.w3.org/2000/svg") for host in hosts), path.name
    assert "<style" not in (PAGE / "index.html").read_text()
    assert " style=" not in (PAGE / "index.html").read_text()


# ------------------------------------------------------------------------------------------------ the command


def command(address: str, *arguments: str) -> Running:
    words = ("--address", address, "dashboard", "--no-browser", *arguments)
    return Running(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_prints_its_address_and_ends_well(tmp_path, number, status):
    with ReplayServer(tables=[TableConfig(name="pool")], port=0) as server:
        process = command(server.address, "--listen", "127.0.0.1:0", "--runs", str(tmp_path))
        address = process.stdout.readline().removeprefix("dashboard at ").strip()
        assert b"<title>replay</title>" in urllib.request.urlopen(address).read()
        process.send_signal(number)
        _, complaints = process.communicate(timeout=60)
        assert complaints == ""
        assert process.returncode == status


def test_beyond_loopback_the_address_holds_a_token():
    process = command("127.0.0.1:1", "--listen", "0.0.0.0:0")
    address = process.stdout.readline().removeprefix("dashboard at ").strip()
    page, _, token = address.partition("#token=")
    assert len(token) >= 32
    port = page.rstrip("/").rpartition(":")[2]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/api/prompts")
    process.terminate()
    process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("arguments", "problem", "status"),
    [
        (("--tokenizer", "/nothing"), "has no tokenizer.json", 1),
        (("--runs", "/nothing"), "'/nothing' does not exist", 2),
        (("--listen", "192.0.2.1:0"), "cannot listen on 192.0.2.1", 1),
    ],
)
def test_options_that_cannot_be_used_end_the_command_with_one_line(arguments, problem, status):
    assert problem in fails("dashboard", "--no-browser", *arguments, status=status)
