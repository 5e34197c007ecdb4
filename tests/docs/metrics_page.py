"""The tables of docs/metrics.md, from what `replay_client.run_metrics` declares.

python -m tests.docs.metrics_page            renews the page
"""

from __future__ import annotations

from collections.abc import Iterable

from replay_client.run_metrics import SECTIONS, Metric
from tests.docs.tables import renewed
from tests.packages import ROOT

PAGE = ROOT / "docs/metrics.md"


def mark_of(section: str) -> str:
    """What stands above the table of a section."""
    return f"<!-- table: python -m tests.docs.metrics_page, {section} -->"


def lines_of(metrics: Iterable[Metric]) -> list[str]:
    """The lines of a table. It has a column for units, and one for healthy ranges, if one of the metrics has any."""
    rows = []
    for metric in metrics:
        names = ", ".join(f"`{name}`" for name in metric.names)
        healthy = "" if metric.healthy is None else str(metric.healthy)
        rows.append({"metric": names, "unit": metric.unit, "healthy": healthy, "meaning": metric.meaning})
    columns = [column for column in ("metric", "unit", "healthy", "meaning") if any(row[column] for row in rows)]
    lines = [_line(columns), "|" + "---|" * len(columns)]
    for row in rows:
        lines.append(_line([row[column] for column in columns]))
    return lines


def _line(cells: Iterable[str]) -> str:
    line = "|"
    for cell in cells:
        escaped = cell.replace("|", "\\|")
        line += f" {escaped} |" if escaped else " |"
    return line


def renewed_page(page: str) -> str:
    """The text of the page with the tables as they are declared now."""
    for section, metrics in SECTIONS.items():
        page = renewed(page, mark_of(section), lines_of(metrics))
    return page


if __name__ == "__main__":
    PAGE.write_text(renewed_page(PAGE.read_text()))
