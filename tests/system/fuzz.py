"""`make fuzz`: atheris on one of the targets, guided by coverage. What breaks it is left in runs/fuzz/TARGET.

python -m tests.system.fuzz rollout|frame|service [--seconds 60] [options of libFuzzer]
"""

from __future__ import annotations

import os
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["replay_protos", "replay_client", "replay_server", "tests.system.targets"]):
    from replay_client.columns import encode_columns
    from replay_client.testing import make_group
    from replay_protos import replay_pb2 as pb
    from tests.kit.groups import make_sequences
    from tests.system import targets


def seeds(name: str) -> Iterator[bytes]:
    """Inputs that get somewhere, to begin with."""
    group = make_group(extras={"x": [1, 2]}, meta={"a": [1]}).encode()
    insert = pb.InsertRequest(
        keys=[1, 2], targets=[pb.InsertTarget(table="plain", priorities=[1, 2])], payload_sizes=[1, 1], payloads=b"ab"
    )
    segment = pb.InsertRequest(
        keys=[1, 2],
        extend=True,
        requests=[9, 8],
        columns=[pb.Columns(names=["c"])],
        payload_sizes=[1, 1],
        payloads=b"ab",
    )
    waits = pb.InsertRequest(keys=[1, 2], targets=[pb.InsertTarget(table="wait")], payload_sizes=[1, 1], payloads=b"ab")
    sample = pb.SampleRequest(table="plain", num_samples=1, timeout=0.0, scope="s", lease=1.0, id=1 << 40)
    stream = pb.DrawRequest(draw=sample, acknowledge=[1 << 40])
    if name == "rollout":
        yield group
        later = encode_columns({"kept": [1], "kept/offsets": [0, 1, 1, 1, 1, 1, 1]}, {"kept": "ragged:token"})
        yield make_sequences(extras={"x": [1, 2]}, axes={"x": "rollout"}).encode() + b"".join(later)
    elif name == "frame":
        yield from (message.SerializeToString() for message in (insert, pb.SampleResponse(batch=1, payloads=b"x")))
    else:
        for number, method in enumerate(targets.METHODS):
            made = {"InsertRequest": insert, "SampleRequest": sample, "DrawRequest": stream}
            data = made.get(method.input_type.name, pb.GetRequest(keys=[1])).SerializeToString()
            yield bytes([number]) + 2 * (struct.pack("<H", len(data)) + data)
            if method.name == "InsertStream":
                both = (waits.SerializeToString(), segment.SerializeToString())
                yield bytes([number]) + b"".join(struct.pack("<H", len(data)) + data for data in both)


def main() -> None:
    name, *options = sys.argv[1:]
    if "--seconds" in options:
        at = options.index("--seconds")
        options[at : at + 2] = [f"-max_total_time={options[at + 1]}"]
    folder = Path("runs/fuzz") / name
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(name)):
        (corpus / f"seed-{number}").write_bytes(data)
    target = {"rollout": targets.rollout, "frame": targets.frame, "service": targets.Service}[name]
    random.seed(0)
    arguments = [sys.argv[0], f"-artifact_prefix={folder}{os.sep}", "-rss_limit_mb=2048", "-timeout=20", *options]
    atheris.Setup([*arguments, str(corpus)], target() if name == "service" else target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
