"""Health: one sentence about a run, whether it learns, and the warning signs in its metrics. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
"""A reward has risen if it grew by more than this share of its early absolute value, which counts as at least 0.1."""
IDLE = 60.0
"""Seconds without an insert or a sample after which a run is idle."""
STOPPED = {Level.OK: "idle", Level.WARNING: "blocked", Level.FAILURE: "failure"}
"""The level of the verdict if a run does not go on, by the level of the finding. "failure" is red, like each failure of
`doctor`, because somebody must act now. "idle" is neither good nor bad."""
SETTLED = 0.2
"""A side is called the bottleneck only if the other side waited for more than this share of the last minute."""


def verdict(info: ServerInfo | None, findings: Sequence[Finding], against: Sequence[Finding]) -> dict[str, str]:
    """The health of the run and, if it is not healthy, the cause: level, headline, short, detail, remedy.

    `info`: None when the server does not answer. `against`: the warning signs that `signals` found.

    The verdict names the first of these that holds: requests wait in vain; a part of the run is gone; another check
    fails; no client asks for anything; the policy shows a warning sign; a check warns, the memory last. So a run is
    "Healthy" or "Running" only while a trainer and a generator are connected. `presence` says which clients these are.
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
    signs = [sign for sign in against if sign.level is not Level.OK]
    if signs:
        worst = max(signs, key=lambda sign: sign.level is Level.FAILURE)
        messages = "; ".join(sign.message for sign in signs)
        finding = Finding("policy", worst.level, messages, worst.remedy)
        return _verdict_of(worst.level, worst.headline or "Running, but look at the policy", finding)
    if bad:
        remark = f"{bad[0].check}: {bad[0].message}; {bad[0].remedy}"
        pace = Finding("", Level.WARNING, bottleneck(info), remark)
        return _verdict_of("warning", f"Running, with {counted(len(bad), 'thing')} to look at", pace)
    pace = Finding("", Level.OK, bottleneck(info))
    if _is_idle(info):
        return _verdict_of("idle", "Idle", pace)
    return _verdict_of("ok", "Healthy", pace)


def _is_idle(info: ServerInfo) -> bool:
    """True if nobody has used any table for a long time."""
    long = max(IDLE, info.long_wait)
    return all(min(table.inserted.age, table.sampled.age) > long for table in info.tables.values())


def _order(finding: Finding) -> tuple[int, bool]:
    # A wait at a table comes before one for permits, which often follows from it.
    return STOPS.index(finding.stops), finding.check == "permits"


def _stopped(first: Finding, stopped: Sequence[Finding]) -> dict[str, str]:
    """The verdict of a run that does not go on. Its level is the worst level of the findings with the same headline."""
    levels = [finding.level for finding in stopped if finding.headline == first.headline]
    worst = max(levels, key=list(STOPPED).index)
    return _verdict_of(STOPPED[worst], first.headline, first)


def bottleneck(info: ServerInfo) -> str:
    """A sentence about the side that waited for the other in the last minute."""
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
    """The learning progress of the newest run: level and sentence.

    `trend`: the trend of the run's fresh reward. `run`: the run's name, empty if no metrics are known. `info`: None
    when the server does not answer. The level is "ok" only if the reward goes up, the trainer is connected, and all
    `signs` are OK. It is "warning" if the reward goes down or a sign is not OK. Otherwise it is "idle".
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
    """The reason why no trainer makes steps now, in words; empty if a trainer is connected."""
    if info is None:
        return "the server does not answer"
    reasons = [overdue.reason for overdue in info.overdue if overdue.role == TRAINER]
    if reasons:
        return reasons[0]
    trainer = trainer_of(info)
    return "" if trainer.is_connected else trainer.why


def signals(metrics: Mapping[str, Sequence[float | None]], versions: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Signs about the policy, in the metrics of the newest run and in the groups of each policy version."""
    known = {}
    for name, series in metrics.items():
        known[name] = [value for value in series if value is not None]
    signs = [
        *_unhealthy_metrics(metrics),
        *_lower_reward(known.get("fresh/reward_mean", [])),
        *_steep_gradient(known.get("train/grad_norm", [])),
    ]
    findings = _fallen_entropy(known, versions)
    findings += [Finding("policy", Level.WARNING, sign) for sign in signs]
    return findings


def _fallen_entropy(known: Mapping[str, Sequence[float]], versions: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """At most one finding about an entropy that fell."""
    # Before there are metrics, the mean negative log-probability of sampled tokens estimates the entropy.
    surprise = [-version["logprob"] for version in versions if version["logprob"] is not None]
    entropies = {"train/entropy": known.get("train/entropy", []), "mean negative log-prob": surprise}
    for name, series in entropies.items():
        early, late = _ends(series, 4)
        if len(series) >= 12 and 0 <= late < 0.25 * early:
            return [_falling(f"{name} fell from {early:.2g} to {late:.2g}", _rewards(known, versions))]
    return []


def _rewards(known: Mapping[str, Sequence[float]], versions: Sequence[Mapping[str, Any]]) -> list[Sequence[float]]:
    """All series of rewards and pass@k in the metrics. Without any: the mean reward of each policy version's groups."""
    rewards = [series for name, series in known.items() if name.endswith("/reward_mean") or "pass@" in name]
    return rewards or [[version["reward"] for version in versions]]


def _unhealthy_metrics(metrics: Mapping[str, Sequence[float | None]]) -> Iterator[str]:
    """A sentence for each metric whose recent median is outside of the range that its declaration calls healthy."""
    for name, healthy, meaning in watched(chain.from_iterable(SECTIONS.values())):
        recent = [value for value in metrics.get(name, ())[-10:] if value is not None]
        if len(recent) >= 3 and healthy.excludes(median(recent)):
            yield f"{name} is {median(recent):.3g}: {meaning}"


def _lower_reward(rewards: Sequence[float]) -> Iterator[str]:
    """A sentence if the mean reward of the newest window of ten steps is far below the best such mean."""
    if len(rewards) < 20:
        return
    means = [sum(rewards[at : at + 10]) / 10 for at in range(0, len(rewards) - 9, 5)]
    best = max(means)
    if means[-1] < best - 0.2 * max(abs(best), 0.1):
        yield f"fresh/reward_mean fell from {best:.3g} at its best to {means[-1]:.3g}"


def _steep_gradient(norms: Sequence[float]) -> Iterator[str]:
    if len(norms) < 20:
        return
    steepest = max(norms[-5:])
    if steepest > 10 * median(norms):
        yield f"train/grad_norm rose to {steepest:.3g}, 10 times its median: a step went wrong"


def _falling(fell: str, rewards: Sequence[Sequence[float]]) -> Finding:
    """The finding for an entropy that fell: the policy learns if the reward or pass@k rose, else it collapses."""
    for series in rewards:
        early, late = _ends(series, max(4, len(series) // 4))
        if late > early + LEARNING * max(abs(early), LEARNING):
            rose = f"while the reward rose from {early:.2g} to {late:.2g}: it learns"
            return Finding("policy", Level.OK, f"{fell}, {rose}")
    remedy = "see what the newest groups say, and go on from an earlier state with a higher epsilon_high"
    return Finding("policy", Level.FAILURE, f"{fell}: the policy is collapsing", remedy, "The policy is collapsing")


def _ends(series: Sequence[float], last: int) -> tuple[float, float]:
    """The medians of the first quarter of a series and of its `last` values."""
    if not series:
        return 0.0, 0.0
    quarter = max(4, len(series) // 4)
    return median(series[:quarter]), median(series[-last:])


def _verdict_of(level: str, headline: str, finding: Finding) -> dict[str, str]:
    if headline.startswith(f"{finding.check}: "):
        short = f"{finding.check} fails"
    else:  # the part before the colon is short enough for the top of every view
        short = headline.partition(":")[0]
    return {
        "level": level,
        "headline": headline,
        "short": short,
        "detail": finding.message,
        "remedy": finding.remedy,
    }
