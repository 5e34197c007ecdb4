"""Traces from the generator through the server to the trainer, with the SDK of OpenTelemetry."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("opentelemetry.sdk", reason="spans need the SDK of OpenTelemetry")

from tests.kit.processes import fails, server_process, tokens_file

# In a process of its own, because the SDK can be set up once in each.
RUN = """
    import asyncio, json, sys
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

    from replay_client import AsyncReplayClient, ReplayClient
    from replay_client.errors import ReplayError
    from replay_generator import GeneratorConfig, run_generator
    from replay_generator.prompts.prompt import Prompt
    from replay_server import ReplayServer, SecurityConfig, TableConfig
    from replay_trainer import StepReport, StepSpans
    from replay_generator.testing import ScriptedEngine

    tokens = sys.argv[1]
    security = SecurityConfig(tokens_file=tokens)
    tables = [TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8})]
    with ReplayServer(tables=tables, port=0, security=security) as server:
        token = "0123456789abcdef0123"
        config = GeneratorConfig(group_size=2, max_groups=2)
        prompts = [Prompt(f"p{i}", "1+1=", {}) for i in range(2)]
        client = lambda: AsyncReplayClient(server.address, token=token)
        run_generator(client, ScriptedEngine(), prompts, lambda row, text: 1.0, config)
        with ReplayClient(server.address, token=token) as client:
            samples = client.sample("rollouts", 2)
            with trace.get_tracer("test").start_as_current_span("mine"):
                try:
                    client.list_items("nope")
                except ReplayError:
                    pass
    StepSpans().on_step(None, StepReport({"step": 1, "time/step": 0.5, "train/loss": 0.25}, samples, [], {}))
    print(json.dumps([json.loads(span.to_json()) for span in exporter.get_finished_spans()]))
"""


def test_a_group_is_followed_from_its_generation_to_the_step_that_trains_on_it(tmp_path):
    pytest.importorskip("torch", reason="the trainer of the run needs it")
    tokens = tokens_file(tmp_path, "read-write:0123456789abcdef0123")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN), str(tokens)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    spans = json.loads(done.stdout.splitlines()[-1])
    generated = [span for span in spans if span["name"] == "replay.generate"]
    assert [span["attributes"]["prompt_id"] for span in generated] in (["p0", "p1"], ["p1", "p0"])
    for root in generated:
        trace = [span for span in spans if span["context"]["trace_id"] == root["context"]["trace_id"]]
        [insert] = [span for span in trace if span["name"] == "replay.insert"]
        assert insert["parent_id"] == root["context"]["span_id"]
    [step] = [span for span in spans if span["name"] == "replay.train_step"]
    assert {link["context"]["trace_id"] for link in step["links"]} == {
        root["context"]["trace_id"] for root in generated
    }
    assert step["attributes"]["replay.step"] == 1
    assert step["attributes"]["replay.loss"] == 0.25
    [failed] = [span for span in spans if span["name"] == "replay.list_items"]
    assert failed["status"]["status_code"] == "ERROR"
    [below] = [span for span in spans if span["kind"] == "SpanKind.SERVER" and span["name"].endswith("/ListItems")]
    assert below["parent_id"] == failed["context"]["span_id"]
    assert below["attributes"]["replay.table"] == "nope"
    assert below["status"] == {"status_code": "ERROR", "description": "NOT_FOUND"}


def test_the_server_process_exports_the_spans_of_calls_that_have_a_context(tmp_path, monkeypatch):
    code = """
        import sys
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        trace.set_tracer_provider(TracerProvider())
        from replay_client import ReplayClient
        with ReplayClient(sys.argv[1]) as client:
            client.policy()
            with trace.get_tracer("test").start_as_current_span("mine") as span:
                client.policy()
                print(f"0x{span.get_span_context().trace_id:032x}")
    """
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    with (tmp_path / "stderr").open("w+") as errors:
        with server_process(tmp_path, stderr=errors) as server:
            trace_id = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(code), server.address],
                capture_output=True,
                text=True,
                check=True,
                env=os.environ,
            ).stdout.strip()
            server.process.terminate()
            assert server.process.wait(200) == 0
        errors.seek(0)
        spans = [json.loads(line) for line in errors if line.startswith("{")]
    assert [span["name"] for span in spans] == ["replay.v1.Replay/GetPolicy"]
    assert spans[0]["context"]["trace_id"] == trace_id
    assert spans[0]["resource"]["attributes"]["service.name"] == "replay-server"


def test_without_an_sdk_nothing_of_opentelemetry_is_loaded():
    code = """
        import sys
        from replay_client import ReplayClient
        from replay_server import ReplayServer, TableConfig
        with ReplayServer(tables=[TableConfig(name="a")], port=0) as server, ReplayClient(server.address) as client:
            client.insert(b"x", {"a": 1.0})
            client.sample("a")
        print([name for name in sys.modules if name.startswith("opentelemetry")])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_wrong_exporter_is_refused_with_those_there_are():
    said = fails("serve", "--listen", "127.0.0.1:0", OTEL_TRACES_EXPORTER="jaeger")
    assert said == "replay: OTEL_TRACES_EXPORTER must be otlp, console or none, not 'jaeger'\n"
