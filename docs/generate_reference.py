"""A hook of mkdocs: writes the reference out of the code: Python, configuration, command line, protocol, metrics."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import tomllib
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / name) for name in (".", "client", "protos", "trainer")]

import typer.main  # noqa: E402
from annotated_types import Ge, Gt, Le, Lt, MinLen  # noqa: E402
from google.protobuf.message import Message  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402
from prometheus_client import CollectorRegistry  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from replay_cli.app import app  # noqa: E402
from replay_dashboard.diagnosis import RULES  # noqa: E402
from replay_protos import replay_pb2 as pb  # noqa: E402
from replay_server.config import DEFAULT_TABLES, Config  # noqa: E402
from replay_server.rpc.auth import ROLES  # noqa: E402
from replay_server.tables.config import TableConfig  # noqa: E402
from replay_server.telemetry.prometheus import Latencies, server_metrics  # noqa: E402

PROTO = ROOT / "protos/replay_protos/replay.proto"
_BELOW = "search:\n  boost: 0.2\n"
"""A reference has all words. Whoever searches for a symptom or a task wants the page that explains it first."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages; mkdocs calls it before it builds."""
    for name, content in pages().items():
        front = "" if name == "configuration" else _BELOW
        if name in PYTHON:
            front += "tags: [API]\n"
        content = f"---\n{front}---\n{content}"
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def on_config(config: Any) -> Any:
    """Puts pages that the navigation does not name at the end of "Explanation"; adds version and repository."""
    named = set(re.findall(r"[\w/-]+\.md", str(config["nav"])))
    others = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in named)
    for section in config["nav"]:
        if isinstance(section, dict) and "Explanation" in section:
            section["Explanation"].extend(others)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config["site_name"] = f"{config['site_name']} {project['version']}"
    # The theme links to it on every page, as soon as the project names one.
    config["repo_url"] = project.get("urls", {}).get("Repository")
    return config


def pages() -> dict[str, str]:
    return {
        **{name: "\n".join(python(name)) for name in PYTHON},
        "configuration": "\n".join(configuration()),
        "command-line": "\n".join(command_line()),
        "protocol": "\n".join(protocol()),
        "metrics": "\n".join(metrics()),
        "doctor": "\n".join(doctor()),
    }


# ---------------------------------------------------------------------------------------------------- Python

PYTHON: dict[str, dict[str, tuple[str, ...]]] = {
    "client": {
        "": (
            "replay_client.AsyncReplayClient",
            "replay_client.ReplayClient",
            "replay_client.client.Writer",
            "replay_client.client.Sampler",
        ),
        "Groups": ("replay_client.rollout", "replay_client.completions"),
        "Scores": ("replay_client.scoring", "replay_client.advantages"),
        "Results": ("replay_client.records",),
        "Access": ("replay_client.access",),
        "Errors": ("replay_client.errors",),
        "Diagnosis": ("replay_dashboard.diagnosis",),
        "Generator": (
            "replay_generator",
            "replay_generator.config.GeneratorConfig",
            "replay_generator.metrics.GeneratorStats",
            "replay_generator.engines",
            "replay_generator.prompts.prompt",
            "replay_generator.rollouts.environments",
            "replay_generator.rewards.functions",
        ),
        "Tests of your own code": ("replay_client.testing", "replay_generator.testing"),
    },
    "server": {
        "": ("replay_server.ReplayServer",),
        "Rate limiters": ("replay_server.tables.limiter",),
        "Roles": ("replay_server.rpc.auth",),
    },
    "trainer": {
        "": (
            "replay_trainer.GRPOTrainer",
            "replay_trainer.GRPOConfig",
            "replay_trainer.Callback",
            "replay_trainer.StepReport",
            "replay_trainer.Run",
            "replay_trainer.TableEvaluation",
            "replay_trainer.PromptEvaluation",
            "replay_trainer.StepSpans",
        ),
        "Groups of a step": ("replay_trainer.groups", "replay_trainer.token_staleness"),
        "Correction": ("replay_trainer.correction",),
        "Presets": ("replay_trainer.correction.presets",),
        "Losses": ("replay_trainer.LossConfig", "replay_trainer.config.Teacher", "replay_trainer.losses"),
        "Batches": ("replay_trainer.batching",),
        "Log-probabilities": ("replay_trainer.logprobs",),
        "Weights": ("replay_trainer.weights", "replay_trainer.publication.Publication"),
    },
}
"""By page and heading: the classes and modules that it shows with their docstrings."""
ONLY = {
    "replay_client.rollout": 'filters: ["!^_", "!^vector$"]',
    "replay_client.records": 'filters: ["!^_", "!_of$", "!_between$"]',
    "replay_trainer.correction": "members: [CorrectionConfig, Rejection, correct, Correction, Moments]",
}
"""What is shown of a module whose names are not all for users."""


def python(page: str) -> Iterator[str]:
    """A page of directives, each of which mkdocstrings replaces by what the docstrings say."""
    package = f"replay_{page}"
    yield f"# {page.capitalize()}\n\nPackage `{package}`. {inspect.getdoc(import_module(package))}\n"
    for heading, names in PYTHON[page].items():
        if heading:
            yield f"## {heading}\n"
        for name in names:
            options = ["heading_level: 3"] if heading else []
            if name.rpartition(".")[2].islower():
                options += ["show_root_heading: false", "show_root_toc_entry: false"]
            options += [ONLY[name]] if name in ONLY else []
            yield f"::: {name}\n    options: {{{', '.join(options)}}}\n"


# ---------------------------------------------------------------------------------------------------- configuration


def configuration() -> Iterator[str]:
    yield "# Configuration\n"
    yield (
        "What `replay serve --config replay.toml` reads, and what the classes of the same fields take in Python. Sizes "
        'in bytes may be numbers or texts such as `"512MiB"` and `"32GB"`. A name that does not exist or a value out '
        "of range is an error that names it.\n"
    )
    for heading, model in sections(Config):
        yield f"## `{heading}`\n"
        yield f"`replay_server.{model.__name__}`. {paragraphs(inspect.getdoc(model) or '')}\n"
        yield from table(model)
    yield from recipes()
    yield "## Without tables\n"
    yield "`replay serve` has these tables without `--config`, and with a file that has no `[[tables]]`:\n\n```python"
    for one in DEFAULT_TABLES:
        values = one.model_dump(exclude_defaults=True, mode="json")
        yield f"TableConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"
    yield "```\n"


def recipes() -> Iterator[str]:
    """The file of each recipe, as it stands."""
    yield "## Recipes\n"
    yield (
        "`--recipe NAME` of `replay serve`, `replay generate` and `replay train` takes the section of that command "
        "from this file. What `--config` or the command line sets wins, field by field of `[admission]`, of each "
        "table and of `[correction]`.\n"
    )
    for path in sorted((ROOT / "client/replay_cli/recipes").glob("*.toml")):
        yield f"`--recipe {path.stem}`:\n\n```toml\n{path.read_text()}```\n"


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Each nested model once, under its place in the file."""
    seen = set()
    for name, field in model.model_fields.items():
        for nested in models_in(field.annotation):
            if nested in seen:
                continue
            seen.add(nested)
            is_list = typing.get_origin(field.annotation) is tuple
            path = f"{prefix}{name}"
            yield (f"[[{path}]]" if is_list else f"[{path}]" if not prefix else path), nested
            yield from sections(nested, f"{path}.")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def table(model: type[BaseModel]) -> Iterator[str]:
    annotations: dict[str, str] = {}
    meanings: dict[str, str] = {}
    for declared in reversed(model.__mro__):  # a section may add fields to those of another one
        if declared is BaseModel or not issubclass(declared, BaseModel):
            continue
        source = ast.parse(textwrap.dedent(inspect.getsource(declared))).body[0]
        assert isinstance(source, ast.ClassDef)
        annotations |= {
            node.target.id: ast.unparse(node.annotation)
            for node in source.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        meanings |= field_docstrings(source)
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    for name, field in model.model_fields.items():
        kind = " or ".join(f"`{part}`" for part in annotations[name].split(" | ") if part != "None")
        cells = (f"`{name}`", kind + bounds(field), default(field), meanings.get(name, ""))
        yield "| " + " | ".join(cell.replace("\n", " ") for cell in cells) + " |"
    yield ""


def field_docstrings(source: ast.ClassDef) -> dict[str, str]:
    """The string right under each field."""
    found = {}
    for node, after in zip(source.body, source.body[1:], strict=False):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[node.target.id] = inspect.cleandoc(str(after.value.value))
    return found


def bounds(field: FieldInfo) -> str:
    words = []
    for constraint in field.metadata:
        match constraint:
            case Ge(ge=value):
                words.append(f"≥ {value}")
            case Gt(gt=value):
                words.append(f"> {value}")
            case Le(le=value) if isinstance(value, int | float) and value < 2**50:
                words.append(f"≤ {value}")
            case Lt(lt=value):
                words.append(f"< {value}")
            case MinLen(min_length=value):
                words.append(f"at least {value}")
    return f" {', '.join(words)}" if words else ""


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.default
    if value is None:
        return "absent"
    if isinstance(value, BaseModel):
        changed = value.model_dump(exclude_defaults=True)
        return f"`{next(iter(changed.values()))!r}`" if set(changed) == {"type"} else "its defaults"
    return f"`{value!r}`".replace("'", '"')


def paragraphs(text: str) -> str:
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


# ---------------------------------------------------------------------------------------------------- command line


def command_line() -> Iterator[str]:
    yield "# Command line\n"
    yield (
        "One command, `replay`. Where it fails it says so in one line on standard error. `replay --install-completion` "
        "lets the shell complete it. The options of the connection stand before a command, or behind it.\n"
    )
    runner = CliRunner(env={"COLUMNS": "110", "TERM": "dumb", "NO_COLOR": "1"})
    group = typer.main.get_command(app)
    yield f"```text\n{runner.invoke(app, ['--help'], prog_name='replay').output.rstrip()}\n```\n"
    for words in leaves(group, []):
        said = runner.invoke(app, [*words, "--help"], prog_name="replay")
        assert said.exit_code == 0, said.output
        yield f"## `replay {' '.join(words)}`\n\n```text\n{said.output.strip()}\n```\n"


def leaves(command: Any, words: list[str]) -> Iterator[list[str]]:
    """The words of every command below this one."""
    if words:
        yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from leaves(below, [*words, name])


# ---------------------------------------------------------------------------------------------------- doctor


def doctor() -> Iterator[str]:
    """Every rule of the diagnosis, as its table has them."""
    yield "# What the doctor finds\n"
    yield (
        "`replay doctor`, the page and `replay_dashboard.diagnosis` know these rules. Names in braces stand for what "
        "was found. With `--json` a finding has its rule.\n"
    )
    yield "| rule | level | finding | remedy |\n|---|---|---|---|"
    for name, rule in RULES.items():
        cells = (f"`{name}`", rule["level"], rule["sentence"], rule["remedy"])
        yield "| " + " | ".join(re.sub(r"![rs]\}|:[.0-9%gf]+\}", "}", cell) for cell in cells) + " |"
    yield ""


# ---------------------------------------------------------------------------------------------------- protocol


def protocol() -> Iterator[str]:
    """The proto file in its own sections, with a table of the methods before them."""
    text = PROTO.read_text()
    introduction, _, rest = text.partition("syntax =")
    yield "# Protocol\n"
    yield "\n".join(line.removeprefix("//").removeprefix(" ") for line in introduction.splitlines())
    yield (
        "Generated from `protos/replay_protos/replay.proto`. A method is called as `/replay.v1.Replay/NAME`; where the "
        "server wants tokens they travel as `authorization: Bearer TOKEN` in the metadata, and a method needs the role "
        "below or a higher one.\n"
    )
    yield "| method | request | response | role |\n|---|---|---|---|"
    for method in pb.DESCRIPTOR.services_by_name["Replay"].methods:
        request = f"{'stream of ' if method.client_streaming else ''}`{method.input_type.name}`"
        response = f"{'stream of ' if method.server_streaming else ''}`{method.output_type.name}`"
        yield f"| `{method.name}` | {request} | {response} | {ROLES[method.name]} |"
    parts = re.split(r"^// -{5,} (.+)$", "syntax =" + rest, flags=re.MULTILINE)
    for title, body in zip(["service", *parts[1::2]], parts[0::2], strict=True):
        yield f"\n## {title.strip().capitalize()}\n\n```proto\n{body.strip()}\n```\n"


# ---------------------------------------------------------------------------------------------------- metrics


def metrics() -> Iterator[str]:
    """A table of what a scrape shows, made from a server info that has every part."""
    info = whole(pb.ServerInfo())
    info.tables[0].config = TableConfig(name="replay", max_bytes=1).model_dump_json()
    calls = CollectorRegistry()
    Latencies(calls).ended("Sample", "OK", 0.0)
    yield "# Metrics\n"
    yield (
        "What Prometheus finds at `http://METRICS_ADDRESS/metrics`, beside the usual `process_*` and `python_gc_*`. "
        "Counters begin anew when the server starts, or a table is reset. "
        "`table` is the name of a table, `operation` is `insert` or `sample`, `statistic` is min, p10, p50, p90, max "
        "or mean.\n"
    )
    yield "| metric | kind | labels | meaning |\n|---|---|---|---|"
    for family in (*server_metrics(info), *calls.collect()):
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
        yield f"| `{name}` | {family.type} | {', '.join(f'`{label}`' for label in labels)} | {family.documentation} |"


def whole(message: Message) -> Any:
    """The message with every message that it can hold, and with 1 as each number."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            inner = getattr(message, field.name)
            whole(inner.add() if field.is_repeated else inner)
        elif field.cpp_type != field.CPPTYPE_STRING:
            setattr(message, field.name, True if field.cpp_type == field.CPPTYPE_BOOL else 1)
    return message
