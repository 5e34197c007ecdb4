"""The wire protocol: `replay.proto` and the code generated from it (`make protos`)."""

import os

NO_EVENT_ENGINE = "-event_engine_client,-event_engine_listener"
"""gRPC's event engine hands every message to one more thread, and a round trip takes half as long again
(`python -m benchmarks.floor`, docs/performance.md)."""

REASON_KEY = "replay-reason"
"""Trailing metadata of a call that ends with RESOURCE_EXHAUSTED; its values are those of RowError.reason."""

# gRPC reads this when its first channel or server is made; a setting of the user's own wins.
os.environ.setdefault("GRPC_EXPERIMENTS", NO_EVENT_ENGINE)
