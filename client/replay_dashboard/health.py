"""Health: one sentence about a run, whether it learns, and the warning signs in its metrics. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

from replay_client.records import ServerInfo
from replay_client.run_metrics import SECTIONS, watched
from replay_client.trend import Direction, Trend
from replay_dashboard.diagnosis import STOPS, Finding, Level
from replay_dashboard.presence import TRAINER, trainer_of
from replay_dashboard.units import counted

LEARNING = 0.1
"""A reward that is higher by this share, at least of 0.1, has risen."""
IDLE = 60.0
"""Seconds without an insert or a sample after which a run is idle."""
STOPPED = {Level.OK: "idle", Level.WARNING: "blocked", Level.FAILURE: "failure"}
"""How bad it is that a run does not go on. "failure" is red, as each failure of `doctor`: somebody must act now. "idle"
is neither good nor bad."""
SETTLED = 0.2
"""Share of the last minute above which a wait counts: below it neither side is called the bottleneck."""


def verdict(info: ServerInfo | None, findings: Sequence[Finding], against: Sequence[Finding]) -> dict[str, str]:
    """Whether the run is healthy and, if not, what blocks it: level, headline, short, detail, remedy.

    `info`: None when the server does not answer. `against`: the warning signs that `signals` found.

    Told is what holds first of this: requests wait in vain; a part of the run is gone; something else fails; nobody
    wants anything; the policy or a check is to be looked at, the memory last. So nothing is "Healthy" or "Running"
    unless a trainer and a generator are connected: `presence` says which clients these are.
    """
    bad = [finding for finding in findings if finding.level is not Level.OK]
    bad.sort(key=lambda finding: (finding.level is not Level.FAILURE, finding.check.startswith("memory")))
    if info is None:
        refused = bad[0].rule == "refused"
        headline = "The server refuses this client" if refused else "The server does not answer"
        return _verdict_of("failure", headline, bad[0])
    stopped = sorted((finding for finding in findings if finding.headline), key=_order)
    urgent = [finding for finding in stopped if finding.level is not Level.OK and finding.stops != "idle"]
    if urgent:
        return _stopped(urgent[0], stopped)
    if bad and bad[0].level is Level.FAILURE:
        return _verdict_of("failure", f"{bad[0].check}: {bad[0].message}", bad[0])
    if stopped:
        return _stopped(stopped[0], stopped)
    if signs := [each for each in against if each.level is not Level.OK]:
        worst = max(signs, key=lambda each: each.level is Level.FAILURE)
        sign = Finding("policy", worst.level, "; ".join(each.message for each in signs), worst.remedy)
        return _verdict_of(worst.level, worst.headline or "Running, but look at the policy", sign)
    if bad:
        count, remark = counted(len(bad), "thing"), f"{bad[0].check}: {bad[0].message}; {bad[0].remedy}"
        pace = Finding("", Level.WARNING, bottleneck(info), remark)
        return _verdict_of("warning", f"Running, with {count} to look at", pace)
    idle = all(min(each.inserted.age, each.sampled.age) > max(IDLE, info.long_wait) for each in info.tables.values())
    pace = Finding("", Level.OK, bottleneck(info))
    return _verdict_of("idle", "Idle", pace) if idle else _verdict_of("ok", "Healthy", pace)


def _order(finding: Finding) -> tuple[int, bool]:
    # A wait at a table comes before one for permits, which often follows from it.
    return STOPS.index(finding.stops), finding.check == "permits"


def _stopped(first: Finding, stopped: Sequence[Finding]) -> dict[str, str]:
    """The verdict of a run that does not go on. What waits in vain, waits for somebody whose loss may be worse."""
    levels = [finding.level for finding in stopped if finding.headline == first.headline]
    worst = max(levels, key=[*STOPPED].index)
    return _verdict_of(STOPPED[worst], first.headline, first)


def bottleneck(info: ServerInfo) -> str:
    """Which side waits for the other, over the last minute."""
    for name, table in info.tables.items():
        if table.sample_blocked_share > max(SETTLED, table.insert_blocked_share):
            share = f"{table.sample_blocked_share:.0%}"
            return f"The trainer waits for {name} {share} of the time: generators set the pace."
        if table.insert_blocked_share > SETTLED:
            return f"Inserts into {name} wait {table.insert_blocked_share:.0%} of the time: the trainer sets the pace."
    if info.admission is not None and info.admission.acquiring.count:
        return "Generators wait for permits: they are as far ahead of the trainer as they may be."
    if not any(table.inserts_per_second or table.samples_per_second for table in info.tables.values()):
        return "Nothing has been inserted or sampled in the last minute."
    return "Neither side waits for the other."


def learning(trend: Trend, run: str, info: ServerInfo | None, signs: Sequence[Finding]) -> dict[str, str]:
    """Whether the newest run learns: level and sentence.

    `trend`: of its fresh reward. `run`: its name; empty: no metrics are known. `info`: None when the server does not
    answer. The level is "ok" only if the reward goes up, the trainer is connected, and no sign is against it; "warning"
    if the reward goes down or a sign is against it; otherwise "idle".
    """
    if not run:
        return {
            "level": "idle",
            "sentence": "Not known: the page has no metrics of a trainer. Name their folder by --runs.",
        }
    sentence = f"Fresh reward of {run}: {trend}."
    missing = _why_no_trainer(info)
    if missing:
        sentence += f" {missing[0].upper()}{missing[1:]}."
    if trend.direction is Direction.DOWN or any(sign.level is not Level.OK for sign in signs):
        level = "warning"
    elif trend.direction is Direction.UP and not missing:
        level = "ok"
    else:
        level = "idle"
    return {"level": level, "sentence": sentence}


def _why_no_trainer(info: ServerInfo | None) -> str:
    """Why no step is made now, in words; empty: a trainer is connected."""
    if info is None:
        return "the server does not answer"
    reasons = [overdue.reason for overdue in info.overdue if overdue.role == TRAINER]
    if reasons:
        return reasons[0]
    trainer = trainer_of(info)
    return "" if trainer.is_connected else trainer.why


def signals(metrics: Mapping[str, Sequence[float | None]], versions: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Signs about the policy, in the metrics of the newest run and in the groups of each policy version."""
    known = {name: [value for value in series if value is not None] for name, series in metrics.items()}
    # Before there are metrics, the mean negative log-probability of sampled tokens estimates the entropy.
    surprise = [-each["logprob"] for each in versions if each["logprob"] is not None]
    rewards = [series for name, series in known.items() if name.endswith("/reward_mean") or "pass@" in name]
    found, signs = [], []
    for name, series in (("train/entropy", known.get("train/entropy", [])), ("mean negative log-prob", surprise)):
        early, late = _ends(series, 4)
        if len(series) >= 12 and 0 <= late < 0.25 * early:
            fell = f"{name} fell from {early:.2g} to {late:.2g}"
            found.append(_falling(fell, rewards or [[each["reward"] for each in versions]]))
            break
    for name, healthy, meaning in watched(chain.from_iterable(SECTIONS.values())):
        recent = [value for value in metrics.get(name, ())[-10:] if value is not None]
        if len(recent) >= 3 and healthy.excludes(median(recent)):
            signs.append(f"{name} is {median(recent):.3g}: {meaning}")
    reward = known.get("fresh/reward_mean", [])
    if len(reward) >= 20:
        means = [sum(reward[at : at + 10]) / 10 for at in range(0, len(reward) - 9, 5)]
        if means[-1] < max(means) - 0.2 * max(abs(max(means)), 0.1):
            signs.append(f"fresh/reward_mean fell from {max(means):.3g} at its best to {means[-1]:.3g}")
    norms = known.get("train/grad_norm", [])
    if len(norms) >= 20 and max(norms[-5:]) > 10 * median(norms):
        signs.append(f"train/grad_norm rose to {max(norms[-5:]):.3g}, 10 times its median: a step went wrong")
    return found + [Finding("policy", Level.WARNING, each) for each in signs]


def _falling(fell: str, rewards: Sequence[Sequence[float]]) -> Finding:
    """An entropy that falls is what learning looks like while the reward or pass@k rises, and else a collapse."""
    for series in rewards:
        early, late = _ends(series, max(4, len(series) // 4))
        if late > early + LEARNING * max(abs(early), LEARNING):
            rose = f"while the reward rose from {early:.2g} to {late:.2g}: it learns"
            return Finding("policy", Level.OK, f"{fell}, {rose}")
    remedy = "see what the newest groups say, and go on from an earlier state with a higher epsilon_high"
    return Finding("policy", Level.FAILURE, f"{fell}: the policy is collapsing", remedy, "The policy is collapsing")


def _ends(series: Sequence[float], last: int) -> tuple[float, float]:
    """The medians of the first quarter of a series and of its `last` values."""
    return (median(series[: max(4, len(series) // 4)]), median(series[-last:])) if series else (0.0, 0.0)


def _verdict_of(level: str, headline: str, finding: Finding) -> dict[str, str]:
    # What stands before the colon is short enough for the top of every view.
    short = f"{finding.check} fails" if headline.startswith(f"{finding.check}: ") else headline.partition(":")[0]
    summary = {"level": level, "headline": headline, "short": short}
    return summary | {"detail": finding.message, "remedy": finding.remedy}
