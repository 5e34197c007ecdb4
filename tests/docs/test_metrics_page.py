"""docs/metrics.md says of each metric what the code declares, and the code declares what a run writes."""

from __future__ import annotations

import json
import re

from replay_client.run_metrics import GENERATOR, SECTIONS, watched
from replay_client.testing import make_group
from replay_generator.metrics import GeneratorMetrics, GroupTimes
from tests.docs.metrics_page import PAGE, lines_of, renewed_page


def test_the_tables_of_the_page_are_what_is_declared():
    page = PAGE.read_text()
    assert renewed_page(page) == page, "run make metrics-page"
    for metrics in SECTIONS.values():
        assert "\n".join(lines_of(metrics)) in page


def test_the_page_names_the_metrics_that_somebody_warns_of():
    page = " ".join(PAGE.read_text().split())
    trainer, dashboard = re.findall(
        r"If ([^.]+) leaves its healthy range[^.]+\. The dashboard[^,]+, and of ([^.]+)\.", page
    )[0]
    others = [metric for section, metrics in SECTIONS.items() if section != "correction" for metric in metrics]
    for sentence, metrics in ((trainer, SECTIONS["correction"]), (dashboard, others)):
        named = set(re.findall(r"`(\w+)`", sentence))
        assert named == {name.rpartition("/")[2] for name, *_ in watched(metrics)}


def test_each_field_of_a_line_of_the_generator_is_declared_and_each_declared_one_is_there(tmp_path):
    metrics = GeneratorMetrics(solved_reward=1.0, path=tmp_path / "generator.jsonl")
    group = make_group()
    metrics.count_inserted(group, {"NAME": group.rewards}, staleness=0, times=GroupTimes())
    metrics.write()
    written = json.loads((tmp_path / "generator.jsonl").read_text())
    assert written.keys() == {name for metric in GENERATOR for name in metric.names}
