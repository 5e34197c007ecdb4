"""Records to one table, one picture and the raw results.

python -m experiments.learning.report runs/learning/runs.jsonl --picture curves.png
python -m experiments.learning.report experiments/results/learning.json --pairs share50:quarter
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.learning import statistics as s
from experiments.learning.loop import IN_PROCESS
from experiments.learning.records import identity, read_records
from experiments.learning.tuned import usual_rate

GENERATED_ONLY = (1.0, 0.0, 0.0, 0.0, 0.0)
COSTS = {"3:1": (3.0, 1.0, 0.0, 0.0, 0.0), "10:1": (10.0, 1.0, 0.0, 0.0, 0.0)}
"""Cost of a generated token against a trained one."""
Records = dict[int, dict[str, Any]]
"""By seed."""
NAMES = {
    "plain": "plain",
    "half": "half of the batch",
    "quarter": "quarter of the batch",
    "eighth": "eighth of the batch",
    "small50-right": "recipe",
    "small50-opsm": "stored groups whole, masked",
    "small50-opsm-half": "stored groups whole, masked at 0.5",
    "small50-distinct": "each right answer once",
    "small50-wide": "4 fresh, 4 stored, wide clip",
    "share25": "12 fresh, 4 stored, clipped",
    "share50": "8 fresh, 8 stored, clipped",
    "share50-ageless": "8 fresh, 8 stored, no half-life",
    "share50-opsm": "8 fresh, 8 stored, masked",
    "share75-wide": "4 fresh, 12 stored, wide clip",
    "quarter-opsm": "quarter, recipe's loss",
    "quarter-opsm-twice": "quarter, recipe's loss, two updates",
    "replace": "holes filled from the pool",
    "recent": "holes filled with recent groups (POPO)",
    "small50-right-open": "recipe, holes left open",
    "dynamic": "dynamic sampling",
    "stale16-truncate": "16 versions behind, truncated",
    "stale16-mask": "16 versions behind, masked tokens",
    "stale16-opsm": "16 versions behind, masked answers",
    "stale16-off": "16 versions behind, uncorrected",
}
"""The tables show an arm under this name; an arm that is not here keeps its own."""


def setting_of(record: dict[str, Any]) -> str:
    """ "task, regime" of a run or of one of its steps: only runs of one setting are compared.

    Runs through the whole system are a setting of their own, and so are runs with another learning rate than usual.
    """
    task, regime, rate = record["task"], record["regime"], record["learning_rate"]
    parts = [task, regime, *([] if record.get("engine", IN_PROCESS) == IN_PROCESS else [record["engine"]])]
    return ", ".join([*parts, *([] if rate == usual_rate(task, regime, record["arm"]) else [f"{rate:g}"])])


def by_setting(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, Records]]:
    """`setting_of` -> arm -> seed -> record.

    Raises ValueError for two runs of one setting, arm and seed.
    """
    settings: dict[str, dict[str, Records]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        setting = setting_of(record)
        of_arm = settings[setting][record["arm"]]
        if record["seed"] in of_arm:
            raise ValueError(
                f"two runs of {setting}, {record['arm']}, seed {record['seed']}: a comparison needs one budget; report "
                "the others from a file of their own"
            )
        of_arm[record["seed"]] = record
    return settings


def compare(arm: Records, baseline: Records, weights: tuple[float, ...]) -> s.Interval:
    """The paired cost ratio over the seeds that both have."""
    seeds = sorted(arm.keys() & baseline.keys())
    return s.interval([s.ratio_to(arm[seed], baseline[seed], weights) for seed in seeds])


def table(records: Iterable[dict[str, Any]]) -> list[str]:
    """Lines of Markdown, a row an arm and setting."""
    lines = [
        "| task, start | arm | seeds | start → end | mean over the run, less plain's | tokens / plain's | "
        "tokens / half batch's | cost / plain's at 3:1 | at 10:1 | trained / generated tokens | worse than its start |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setting, arms in sorted(by_setting(records).items()):
        plain, half = arms.get("plain", {}), arms.get("half", {})
        for name, arm in arms.items():
            starts = np.mean([record["curve"][0][s.SOLVE_RATE] for record in arm.values()])
            ends = np.mean([s.end(record) for record in arm.values()])
            cells = [setting, NAMES.get(name, name), str(len(arm)), f"{starts:.3f} → {ends:.3f}"]
            if name == "plain":
                cells += ["", "", "", "", ""]
            else:
                cells += [shown(gain(arm, plain), "+.3f"), shown(compare(arm, plain, GENERATED_ONLY))]
                cells += ["" if name == "half" else shown(compare(arm, half, GENERATED_ONLY))]
                cells += [shown(compare(arm, plain, weights)) for weights in COSTS.values()]
            cells += [f"{trained_per_generated(arm):.2f}", f"{sum(map(s.collapsed, arm.values()))} of {len(arm)}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def pair_table(records: Iterable[dict[str, Any]], pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of Markdown, a row a pair and setting: the first arm against the second, on the seeds of both."""
    lines = [
        "| task, start | arm / baseline | seeds | tokens | cost at 3:1 | at 10:1 | "
        "difference of the means over the run | of the ends |",
        "|---|---|---|---|---|---|---|---|",
    ]
    pairs = list(pairs)
    for setting, arms in sorted(by_setting(records).items()):
        for name, other in pairs:
            arm, baseline = arms.get(name, {}), arms.get(other, {})
            seeds = sorted(arm.keys() & baseline.keys())
            if not seeds:
                continue
            cells = [setting, f"{NAMES.get(name, name)} / {NAMES.get(other, other)}", " ".join(map(str, seeds))]
            cells += [shown(compare(arm, baseline, weights)) for weights in (GENERATED_ONLY, *COSTS.values())]
            cells += [shown(gain(arm, baseline), "+.3f"), shown(gain(arm, baseline, s.end), "+.3f")]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


SHORT = {
    "recipe": ("small50-right", "plain"),
    "stored groups whole, masked": ("small50-opsm", "plain"),
    "quarter of the batch": ("quarter", "plain"),
    "recipe / quarter": ("small50-right", "quarter"),
}
"""Columns of `short_table`: an arm, and the baseline that its tokens are divided by."""


def short_table(records: Iterable[dict[str, Any]]) -> list[str]:
    """Lines of Markdown, a row a setting: the ratio of generated tokens for each pair of SHORT, and its seeds."""
    lines = [f"| task, start | {' | '.join(SHORT)} |", "|---" * (1 + len(SHORT)) + "|"]
    for setting, arms in sorted(by_setting(records).items()):
        cells = []
        for name, other in SHORT.values():
            arm, baseline = arms.get(name, {}), arms.get(other, {})
            seeds = len(arm.keys() & baseline.keys())
            ratio = shown(compare(arm, baseline, GENERATED_ONLY)) if seeds else ""
            cells.append(f"{ratio} ({seeds} seed{'s' * (seeds > 1)})" if ratio else "")
        if any(cells):
            lines.append(f"| {setting} | {' | '.join(cells)} |")
    return lines


def variety_table(records: Iterable[dict[str, Any]]) -> list[str]:
    """Lines of Markdown, a row an arm and setting: the variety of right answers, of the runs that measured it."""
    lines = [
        "| task, start | arm | seeds | pass@8, start → end | less plain's | less quarter batch's | "
        "different right answers among 8, start → end | entropy of a right answer, nats |",
        "|---|---|---|---|---|---|---|---|",
    ]
    measured = [record for record in records if "variety" in record]
    for setting, arms in sorted(by_setting(measured).items()):
        for name, arm in arms.items():
            starts, ends = (np.mean([r["variety"][i] for r in arm.values()], axis=0) for i in (0, -1))
            passed = [
                "" if name == other else shown(gain(arm, arms.get(other, {}), passed_at_end), "+.3f")
                for other in ("plain", "quarter")
            ]
            shifts = [f"{start:.2f} → {end:.2f}" for start, end in zip(starts, ends, strict=True)]
            cells = [setting, NAMES.get(name, name), str(len(arm)), shifts[0], *passed, *shifts[1:]]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def passed_at_end(record: dict[str, Any]) -> float:
    """pass@8 at the end of a run."""
    return float(record["variety"][-1][0])


def gain(arm: Records, baseline: Records, measure: Callable[[dict[str, Any]], float] = s.area) -> s.Interval:
    """The mean over the seeds that both have of the difference in `measure`."""
    seeds = sorted(arm.keys() & baseline.keys())
    return s.mean_interval([measure(arm[seed]) - measure(baseline[seed]) for seed in seeds])


def trained_per_generated(arm: Records) -> float:
    """Trained tokens over generated tokens, of all runs together."""
    last = np.array([record["curve"][-1] for record in arm.values()])
    return float(last[:, s.TRAINED].sum() / last[:, s.GENERATED].sum())


def shown(interval: s.Interval, style: str = ".2f") -> str:
    """median [low, high]; "never" for infinity."""
    if math.isnan(interval.median):
        return ""
    median, low, high = ("never" if math.isinf(x) else f"{x:{style}}" for x in vars(interval).values())
    return f"**{median}** [{low}, {high}]"


def draw(records: Iterable[dict[str, Any]], arms: list[str], path: Path) -> None:
    """A panel a setting with two of the arms: the mean over seeds of each arm's solve rate, by generated tokens.

    The standard error is beside it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    least = min(2, len(arms))  # a single curve compares nothing
    every = sorted(by_setting(records).items())
    settings = {name: found for name, found in every if sum(arm in found for arm in arms) >= least}
    columns = min(3, len(settings))
    rows = math.ceil(len(settings) / columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False)
    for axis, (setting, found) in zip(axes.flat, settings.items(), strict=False):
        for number, arm in enumerate(arms):
            if arm not in found:
                continue
            curves = [s.curve_of(record) for record in found[arm].values()]
            grid = np.linspace(0, min(curve[-1, s.GENERATED] for curve in curves), 40)
            rates = np.array([np.interp(grid, curve[:, s.GENERATED], curve[:, s.SOLVE_RATE]) for curve in curves])
            error = rates.std(axis=0, ddof=1) / math.sqrt(len(rates)) if len(rates) > 1 else 0 * rates[0]
            axis.plot(
                grid / 1000, rates.mean(axis=0), color=f"C{number}", label=f"{NAMES.get(arm, arm)} ({len(rates)})"
            )
            axis.fill_between(
                grid / 1000, rates.mean(axis=0) - error, rates.mean(axis=0) + error, color=f"C{number}", alpha=0.15
            )
        axis.set_title(setting, fontsize=10)
        axis.set_xlabel("thousand generated tokens")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes[:, 0]:
        axis.set_ylabel("held-out solve rate")
    for axis in list(axes.flat)[len(settings) :]:
        axis.remove()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--arms", nargs="+", default=["plain", "half", "share50"], help="of the picture")
    parser.add_argument(
        "--pairs",
        nargs="+",
        default=[],
        metavar="ARM:BASELINE",
        help="also compares these arms, such as share50:quarter",
    )
    parser.add_argument("--json", type=Path, help="where the raw results go, without what differs between machines")
    arguments = parser.parse_args()
    every = [record for path in arguments.records for record in read_records(path)]
    # A run that two files have is one run.
    records = list({(identity(record), record["engine"]): record for record in every}.values())
    print("\n".join(table(records)))
    if any("variety" in record for record in records):
        print("\n" + "\n".join(variety_table(records)))
    if arguments.pairs:
        pairs = [(arm, baseline) for arm, _, baseline in (pair.partition(":") for pair in arguments.pairs)]
        print("\n" + "\n".join(pair_table(records, pairs)))
    if arguments.picture is not None:
        draw(records, arguments.arms, arguments.picture)
    if arguments.json is not None:
        arguments.json.write_text("[\n" + ",\n".join(json.dumps(rounded(record)) for record in records) + "\n]\n")


def rounded(value: Any) -> Any:
    """Floats to five significant digits, for a file that people may want to read."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return {name: rounded(each) for name, each in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    main()
