"""Health: one sentence about a run, and the warning signs in its metrics. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from replay_client.records import ServerInfo
from replay_dashboard.diagnosis import Finding, Level
from replay_dashboard.units import counted

LEARNING = 0.1
"""A reward that is higher by this share, at least of 0.1, has risen."""
IDLE = 60.0
"""Seconds without an insert or a sample after which a run is idle."""
STOPPED = {Level.OK: "ok", Level.WARNING: "blocked", Level.FAILURE: "failure"}
"""How bad it is that a run does not go on. "failure" is red, as each failure of `doctor`: somebody must act now."""
SETTLED = 0.2
"""Share of the last minute above which a wait counts: below it neither side is called the bottleneck."""

RULES: tuple[tuple[str, float, float, str], ...] = (
    ("correction/ess", 0.3, 1e30, "a few tokens carry the gradient: lower clip_max, or allow less staleness"),
    ("correction/kl", -0.1, 0.1, "the data is far from the policy: lower max_staleness or the learning rate"),
    ("correction/ratio_mean", 0.5, 2.0, "sampler and trainer compute different things: compare sampling and weights"),
    ("correction/chi2", -1e30, 1.0, "single tokens have huge ratios: mask or reject them"),
    ("fresh/zero_variance_fraction", 0.0, 0.8, "few groups teach anything: the prompts are too hard or too easy"),
    ("fresh/truncated_fraction", 0.0, 0.1, "completions are cut off: raise the limit of tokens"),
    ("replay/groups_missing", 0.0, 0.5, "the pool is too small, or too strict, to replace every group"),
)
"""Metric, its least and its greatest healthy value (docs/metrics.md), and the meaning of a value outside."""


def verdict(info: ServerInfo | None, findings: Sequence[Finding], against: Sequence[Finding]) -> dict[str, str]:
    """Whether the run is healthy and, if not, what blocks it: level, headline, short, detail, remedy.

    `info`: None when the server does not answer. `against`: the warning signs that `signals` found.
    """
    bad = [finding for finding in findings if finding.level is not Level.OK]
    bad.sort(key=lambda finding: finding.level is not Level.FAILURE)
    if info is None:
        return _said("failure", "The server does not answer", bad[0])
    # Who is gone comes first: whatever waits, waits for them. Then a wait at a table, and then one for permits.
    if stopped := [finding for finding in findings if finding.headline]:
        first = min(stopped, key=lambda finding: finding.check == "permits")
        return _said(STOPPED[first.level], first.headline, first)
    if bad and bad[0].level is Level.FAILURE:
        return _said("failure", f"{bad[0].check}: {bad[0].message}", bad[0])
    if signs := [each for each in against if each.level is not Level.OK]:
        worst = max(signs, key=lambda each: each.level is Level.FAILURE)
        sign = Finding("policy", worst.level, "; ".join(each.message for each in signs), worst.remedy)
        return _said(worst.level, worst.headline or "Running, but look at the policy", sign)
    if bad:
        count, remark = counted(len(bad), "thing"), f"{bad[0].check}: {bad[0].message}; {bad[0].remedy}"
        pace = Finding("", Level.WARNING, bottleneck(info), remark)
        return _said("warning", f"Running, with {count} to look at", pace)
    idle = all(min(each.inserted.age, each.sampled.age) > max(IDLE, info.long_wait) for each in info.tables.values())
    return _said("ok", "Idle" if idle else "Healthy", Finding("", Level.OK, bottleneck(info)))


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
    for name, least, most, meaning in RULES:
        recent = [value for value in metrics.get(name, ())[-10:] if value is not None]
        if len(recent) >= 3 and not least <= median(recent) <= most:
            signs.append(f"{name} is {median(recent):.3g}: {meaning}")
    reward = known.get("fresh/reward_mean", [])
    if len(reward) >= 20:
        means = [sum(reward[at : at + 10]) / 10 for at in range(0, len(reward) - 9, 5)]
        if means[-1] < max(means) - 0.2 * max(abs(max(means)), 0.1):
            signs.append(f"fresh/reward_mean fell from {max(means):.3g} to {means[-1]:.3g}")
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


def _said(level: str, headline: str, finding: Finding) -> dict[str, str]:
    # What stands before the colon is short enough for the top of every view.
    short = f"{finding.check} fails" if headline.startswith(f"{finding.check}: ") else headline.partition(":")[0]
    said = {"level": level, "headline": headline, "short": short}
    return said | {"detail": finding.message, "remedy": finding.remedy}
