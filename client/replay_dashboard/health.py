"""Health: a verdict on a run in one sentence, its learning progress, and the warning signs in its metrics.

All functions are pure.
"""

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
"""A reward has risen if it grew by more than this share of its early absolute value. An absolute value below 0.1 counts
as 0.1."""
IDLE = 60.0
"""Seconds without an insert or a sample after which a run is idle."""
STOPPED = {Level.OK: "idle", Level.WARNING: "blocked", Level.FAILURE: "failure"}
"""The level of the verdict if a run does not go on, by the level of the finding. The page shows "failure" in red, like
each failure of `doctor`, because somebody must act now. "idle" is neither good nor bad."""
SETTLED = 0.2
"""A side is called the bottleneck only if the other side waited for more than this share of the last minute."""


def verdict(info: ServerInfo | None, findings: Sequence[Finding], against: Sequence[Finding]) -> dict[str, str]:
    """The health of the run and, if it is not healthy, the cause. The fields are those of `_verdict_of`.

    `info`: None when the server does not answer; then `findings` has a finding that says so. `against`: the signs about
    the policy that `signals` found.

    The verdict names the first of these that holds: requests wait in vain; a part of the run is gone; another check
    fails; no client uses the server; the policy shows a warning sign; a check warns, the memory last. So a run is
    "Healthy" or "Running" only while a trainer and a generator are connected. `presence` says which clients these are.
    """
    bad = [finding for finding in findings if finding.level is not Level.OK]
    # False sorts before True: failures first, and findings about the memory last within their level.
    bad.sort(key=lambda finding: (finding.level is not Level.FAILURE, finding.check.startswith("memory")))
    if info is None:
        refused = bad[0].rule == "refused"
        headline = "The server refuses this client" if refused else "The server does not answer"
        return _verdict_of("failure", headline, bad[0])
    stopped = sorted((finding for finding in findings if finding.headline), key=_order)
    # Not urgent are a part that may still connect soon after the start, and a server to which nobody is connected.
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
    """True if nobody has inserted into or sampled any table for a long time."""
    long = max(IDLE, info.long_wait)
    return all(min(table.inserted.age, table.sampled.age) > long for table in info.tables.values())


def _order(finding: Finding) -> tuple[int, bool]:
    """The sort key of a finding that stops the run: its reason in the order of STOPS, then findings about permits last.

    A wait for permits often follows from a wait at a table.
    """
    return STOPS.index(finding.stops), finding.check == "permits"


def _stopped(first: Finding, stopped: Sequence[Finding]) -> dict[str, str]:
    """The verdict of a run that does not go on, because of the finding `first`.

    `stopped` are all findings that stop the run. The level follows from the worst of those with the same headline.
    """
    levels = [finding.level for finding in stopped if finding.headline == first.headline]
    worst = max(levels, key=list(STOPPED).index)  # STOPPED lists the worst level last
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
    """The learning progress of the newest run: `level` and `sentence`.

    `trend`: the trend of the run's fresh reward. `run`: the run's name, empty if no metrics are known. `info`: None
    when the server does not answer. `signs`: the signs about the policy that `signals` found.

    The level is "warning" if the reward goes down or a sign is not OK. Otherwise it is "ok" if the reward goes up and
    the trainer is connected, and else "idle".
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
    """Signs about the policy, in the metrics of the newest run and in the means of each policy version's groups.

    `versions` are the rows of `PromptLog.by_version`, the oldest first.
    """
    known = {}  # the values of each metric, without the steps that lack it
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
    """A finding if the entropy fell below a quarter of its early value; at most one."""
    # The mean negative log-probability of the sampled tokens estimates the entropy, also without metrics.
    surprise = [-version["logprob"] for version in versions if version["logprob"] is not None]
    entropies = {"train/entropy": known.get("train/entropy", []), "mean negative log-prob": surprise}
    for name, series in entropies.items():
        early, late = _ends(series, 4)
        is_long_enough = len(series) >= 12
        if is_long_enough and 0 <= late < 0.25 * early:  # below 0, the values are no entropies
            return [_falling(f"{name} fell from {early:.2g} to {late:.2g}", _rewards(known, versions))]
    return []


def _rewards(known: Mapping[str, Sequence[float]], versions: Sequence[Mapping[str, Any]]) -> list[Sequence[float]]:
    """All series of rewards and of pass@k in the metrics; if there are none, the mean reward of each policy version."""
    rewards = [series for name, series in known.items() if name.endswith("/reward_mean") or "pass@" in name]
    return rewards or [[version["reward"] for version in versions]]


def _unhealthy_metrics(metrics: Mapping[str, Sequence[float | None]]) -> Iterator[str]:
    """A sentence for each metric whose median over the last ten steps is outside of its declared healthy range.

    A metric that fewer than three of these steps have is left out.
    """
    for name, healthy, meaning in watched(chain.from_iterable(SECTIONS.values())):
        recent = [value for value in metrics.get(name, ())[-10:] if value is not None]
        if len(recent) >= 3 and healthy.excludes(median(recent)):
            yield f"{name} is {median(recent):.3g}: {meaning}"


def _lower_reward(rewards: Sequence[float]) -> Iterator[str]:
    """A sentence if the mean reward of the newest window of ten steps is far below the best such mean.

    A window begins at every fifth step, so up to four of the newest steps are in no window yet.
    """
    if len(rewards) < 20:
        return
    means = [sum(rewards[start : start + 10]) / 10 for start in range(0, len(rewards) - 9, 5)]
    best = max(means)
    if means[-1] < best - 0.2 * max(abs(best), 0.1):
        yield f"fresh/reward_mean fell from {best:.3g} at its best to {means[-1]:.3g}"


def _steep_gradient(norms: Sequence[float]) -> Iterator[str]:
    """A sentence if the norm of a gradient in the last five steps is far above the median of all."""
    if len(norms) < 20:
        return
    steepest = max(norms[-5:])
    if steepest > 10 * median(norms):
        yield f"train/grad_norm rose to {steepest:.3g}, 10 times its median: a step went wrong"


def _falling(fell: str, rewards: Sequence[Sequence[float]]) -> Finding:
    """The finding about an entropy that fell. If a reward or pass@k rose, the policy learns, otherwise it collapses.

    `fell` tells of the entropy in words. `rewards` are series of rewards and of pass@k.
    """
    for series in rewards:
        early, late = _ends(series, max(4, len(series) // 4))
        if late > early + LEARNING * max(abs(early), LEARNING):
            rose = f"while the reward rose from {early:.2g} to {late:.2g}: it learns"
            return Finding("policy", Level.OK, f"{fell}, {rose}")
    remedy = "see what the newest groups say, and go on from an earlier state with a higher epsilon_high"
    return Finding("policy", Level.FAILURE, f"{fell}: the policy is collapsing", remedy, "The policy is collapsing")


def _ends(series: Sequence[float], last: int) -> tuple[float, float]:
    """The medians of the first quarter of a series, at least 4 values, and of its `last` values; 0 if it is empty."""
    if not series:
        return 0.0, 0.0
    quarter = max(4, len(series) // 4)
    return median(series[:quarter]), median(series[-last:])


def _verdict_of(level: str, headline: str, finding: Finding) -> dict[str, str]:
    """The verdict as JSON: level, headline, a short headline for the top of every view, and the finding in detail."""
    if headline.startswith(f"{finding.check}: "):  # the part before the colon would only name the check
        short = f"{finding.check} fails"
    else:
        short = headline.partition(":")[0]
    return {
        "level": level,
        "headline": headline,
        "short": short,
        "detail": finding.message,
        "remedy": finding.remedy,
    }
