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
"""A reward has risen if it grew by more than this share of its early absolute value, or of _LEAST_SCALE."""
_LEAST_SCALE = 0.1
"""A change of a reward counts if it is larger than a share of the reward's absolute value. An absolute value below this
number counts as this number, because otherwise the smallest change of a reward near 0 would count."""
IDLE = 60.0
"""Seconds without any insert or sample after which a run is idle, or `long_wait` of the server if that is longer."""
STOPPED = {Level.OK: "idle", Level.WARNING: "blocked", Level.FAILURE: "failure"}
"""The level of the verdict if a run does not go on, by the level of the finding. The page shows "failure" in red, like
each failure of `doctor`, because somebody must act now. "idle" is neither good nor bad."""
SETTLED = 0.2
"""A side is called the bottleneck only if the other side waited for more than this share of the last minute."""


def verdict(info: ServerInfo | None, findings: Sequence[Finding], signs: Sequence[Finding]) -> dict[str, str]:
    """The health of the run and, if the run is not healthy, the cause. The fields are those of `_verdict_of`.

    `info`: None when the server does not answer. Then `findings` has a finding that says so. `signs`: the signs about
    the policy that `signals` found.

    The verdict names the first of these that holds: requests wait in vain; a part of the run is gone; another check
    fails; no client uses the server; the policy shows a warning sign; a check warns, the memory last. So a run is
    "Healthy" or "Running" only while a trainer and a generator are connected. `presence` says which clients these are.
    """
    bad = [finding for finding in findings if finding.level is not Level.OK]
    # False sorts before True: failures first, and findings about the memory last within their level.
    bad.sort(key=lambda finding: (finding.level is not Level.FAILURE, finding.check.startswith("memory")))
    if info is None:
        is_refused = bad[0].rule == "refused"
        headline = "The server refuses this client" if is_refused else "The server does not answer"
        return _verdict_of("failure", headline, bad[0])
    stopping = [finding for finding in findings if finding.headline]
    stopping.sort(key=_stopping_order)
    # A finding with level OK is not urgent. For example, soon after the start, a part may still connect. A finding that
    # nobody uses the server is not urgent either.
    urgent = [finding for finding in stopping if finding.level is not Level.OK and finding.stops != "idle"]
    if urgent:
        return _stopped_verdict(urgent[0], stopping)
    if bad and bad[0].level is Level.FAILURE:
        return _verdict_of("failure", f"{bad[0].check}: {bad[0].message}", bad[0])
    if stopping:
        return _stopped_verdict(stopping[0], stopping)
    bad_signs = [sign for sign in signs if sign.level is not Level.OK]
    if bad_signs:
        failures = [sign for sign in bad_signs if sign.level is Level.FAILURE]
        worst = failures[0] if failures else bad_signs[0]
        messages = "; ".join(sign.message for sign in bad_signs)
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
    long_time = max(IDLE, info.long_wait)
    return all(min(table.inserted.age, table.sampled.age) > long_time for table in info.tables.values())


def _stopping_order(finding: Finding) -> tuple[int, bool]:
    """The sort key of a finding that stops the run. Findings sort by their reason, in the order of STOPS.

    Findings about permits come last within a reason, because a wait for permits often follows from a wait at a table.
    """
    return STOPS.index(finding.stops), finding.check == "permits"


def _stopped_verdict(first: Finding, stopping: Sequence[Finding]) -> dict[str, str]:
    """The verdict of a run that does not go on because of the finding `first`.

    `stopping` are all findings that stop the run. The level of the verdict follows from the worst level among the
    findings with the headline of `first`.
    """
    levels = [finding.level for finding in stopping if finding.headline == first.headline]
    worst = max(levels, key=list(STOPPED).index)  # STOPPED lists the worst level last
    return _verdict_of(STOPPED[worst], first.headline, first)


def bottleneck(info: ServerInfo) -> str:
    """Says in a sentence which side waited for the other in the last minute, if one did."""
    for name, table in info.tables.items():
        sample_wait = table.sample_blocked_share
        insert_wait = table.insert_blocked_share
        if sample_wait > max(SETTLED, insert_wait):
            return f"The trainer waits for {name} {sample_wait:.0%} of the time: generators set the pace."
        if insert_wait > SETTLED:
            return f"Inserts into {name} wait {insert_wait:.0%} of the time: the trainer sets the pace."
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
    why_no_trainer = _why_no_trainer(info)
    if why_no_trainer:
        sentence += f" {why_no_trainer[0].upper()}{why_no_trainer[1:]}."
    if trend.direction is Direction.DOWN or any(sign.level is not Level.OK for sign in signs):
        level = "warning"
    elif trend.direction is Direction.UP and not why_no_trainer:
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
    if trainer.is_connected:
        return ""
    return trainer.why


def signals(metrics: Mapping[str, Sequence[float | None]], versions: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Finds signs about the policy in the metrics of the newest run, and in the means over each version's groups.

    `metrics` has the value of each step, by the name of the metric; None: the step has no value. `versions` are the
    rows of `PromptLog.by_version`, the oldest first.
    """
    known = {}  # the values of each metric, without the steps that lack it
    for name, series in metrics.items():
        known[name] = [value for value in series if value is not None]
    sentences = [
        *_unhealthy_metrics(metrics),
        *_lower_reward(known.get("fresh/reward_mean", [])),
        *_steep_gradient(known.get("train/grad_norm", [])),
    ]
    findings = _fallen_entropy(known, versions)
    findings += [Finding("policy", Level.WARNING, sentence) for sentence in sentences]
    return findings


def _fallen_entropy(known: Mapping[str, Sequence[float]], versions: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """A list with one finding if the entropy fell below a quarter of its early value, otherwise an empty list."""
    # The mean negative log-probability of the sampled tokens estimates the entropy, even if the run has no metrics.
    surprise = [-version["logprob"] for version in versions if version["logprob"] is not None]
    entropies = {"train/entropy": known.get("train/entropy", []), "mean negative log-prob": surprise}
    for name, series in entropies.items():
        early, late = _early_and_late(series, 4)
        is_long_enough = len(series) >= 12
        if is_long_enough and 0 <= late < 0.25 * early:  # below 0, the values are no entropies
            fell = f"{name} fell from {early:.2g} to {late:.2g}"
            return [_fallen_entropy_finding(fell, _reward_series(known, versions))]
    return []


def _reward_series(
    known: Mapping[str, Sequence[float]], versions: Sequence[Mapping[str, Any]]
) -> list[Sequence[float]]:
    """All series of rewards and of pass@k in the metrics; if there are none, the mean reward of each policy version."""
    rewards = [series for name, series in known.items() if name.endswith("/reward_mean") or "pass@" in name]
    return rewards or [[version["reward"] for version in versions]]


def _unhealthy_metrics(metrics: Mapping[str, Sequence[float | None]]) -> Iterator[str]:
    """Yields a sentence for each metric whose median over the last ten steps is outside of its declared healthy range.

    A metric that fewer than three of these steps have is left out.
    """
    for name, healthy, meaning in watched(chain.from_iterable(SECTIONS.values())):
        recent = [value for value in metrics.get(name, ())[-10:] if value is not None]
        if len(recent) >= 3 and healthy.excludes(median(recent)):
            yield f"{name} is {median(recent):.3g}: {meaning}"


def _lower_reward(rewards: Sequence[float]) -> Iterator[str]:
    """Yields a sentence if the mean reward of the newest window of ten steps is far below that of the best window.

    A window begins at every fifth step, so up to four of the newest steps are in no window yet.
    """
    if len(rewards) < 20:
        return
    starts = range(0, len(rewards) - 9, 5)
    means = [sum(rewards[start : start + 10]) / 10 for start in starts]
    best = max(means)
    if means[-1] < best - 0.2 * max(abs(best), _LEAST_SCALE):
        yield f"fresh/reward_mean fell from {best:.3g} at its best to {means[-1]:.3g}"


def _steep_gradient(norms: Sequence[float]) -> Iterator[str]:
    """Yields a sentence if a gradient norm of the last five steps is more than 10 times the median of all steps."""
    if len(norms) < 20:
        return
    steepest = max(norms[-5:])
    if steepest > 10 * median(norms):
        yield f"train/grad_norm rose to {steepest:.3g}, 10 times its median: a step went wrong"


def _fallen_entropy_finding(fell: str, rewards: Sequence[Sequence[float]]) -> Finding:
    """The finding about an entropy that fell. If a reward or pass@k rose, the policy learns. Otherwise it collapses.

    `fell` says in words how the entropy fell. `rewards` are series of rewards and of pass@k.
    """
    for series in rewards:
        quarter = max(4, len(series) // 4)
        early, late = _early_and_late(series, quarter)
        if late > early + LEARNING * max(abs(early), _LEAST_SCALE):
            rose = f"while the reward rose from {early:.2g} to {late:.2g}: it learns"
            return Finding("policy", Level.OK, f"{fell}, {rose}")
    remedy = "see what the newest groups say, and go on from an earlier state with a higher epsilon_high"
    return Finding("policy", Level.FAILURE, f"{fell}: the policy is collapsing", remedy, "The policy is collapsing")


def _early_and_late(series: Sequence[float], late_count: int) -> tuple[float, float]:
    """The median of the first quarter of a series, and the median of its last `late_count` values.

    The first quarter has at least 4 values, or all values if there are fewer. Both medians are 0 for an empty series.
    """
    if not series:
        return 0.0, 0.0
    quarter = max(4, len(series) // 4)
    return median(series[:quarter]), median(series[-late_count:])


def _verdict_of(level: str, headline: str, finding: Finding) -> dict[str, str]:
    """The verdict as JSON: level, headline, `short` (a short headline for the top of every view), detail and remedy."""
    if headline.startswith(f"{finding.check}: "):  # what stands before the colon is only the name of the check
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
