"""The wire protocol: `replay.proto` and the code generated from it (`make protos`); and the settings of gRPC.

Each package that a user may import first imports this package before anything else, because gRPC reads its settings
when `grpc` is imported.
"""

import logging
import os
import sys

NO_EVENT_ENGINE = "-event_engine_client,-event_engine_listener"
"""gRPC's event engine hands every message to one more thread, and a round trip takes up to a third longer
(docs/record/performance.md)."""

REASON_KEY = "replay-reason"
"""Trailing metadata: why a call ends with RESOURCE_EXHAUSTED or UNAVAILABLE (as RowError.reason), or CLOSING."""
CLOSING = "closing"
"""The reason with which a server that stops ends a stream."""
SHORT_METHODS = ("UpdatePriorities", "Delete", "ConsumeItems")
"""The methods that clients call on an open stream (`Calls`): they are frequent, and their answers are short. A token
that may open the stream may call each of them."""

if "grpc" in sys.modules and "GRPC_EXPERIMENTS" not in os.environ:
    logging.getLogger(__name__).warning(
        "grpc was imported before replay_client, so its event engine is on, and each call takes up to a third longer; "
        "import replay_client first, or start the program with GRPC_EXPERIMENTS=%s",
        NO_EVENT_ENGINE,
    )
# A setting of the user's own wins. Processes that this one starts inherit it.
os.environ.setdefault("GRPC_EXPERIMENTS", NO_EVENT_ENGINE)

__all__ = ["CLOSING", "NO_EVENT_ENGINE", "REASON_KEY", "SHORT_METHODS"]
