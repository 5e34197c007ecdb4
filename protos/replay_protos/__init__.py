"""The wire protocol: `replay.proto` and the code generated from it (`make protos`). Also sets up gRPC on import.

gRPC reads its settings when `grpc` is imported, so this package must be imported before. Therefore every package that a
user may import begins with an import of this package.
"""

import logging
import os
import sys

NO_EVENT_ENGINE = "-event_engine_client,-event_engine_listener"
"""The value of GRPC_EXPERIMENTS that turns gRPC's event engine off. With the engine, every message passes through one
more thread, and a round trip takes up to a third longer (docs/record/performance.md)."""

REASON_KEY = "replay-reason"
"""The key of the trailing metadata with the reason why a call failed (`replay_server.errors.Reason` has the values).
Calls that failed for another reason than these have no such key."""
CLOSING = "closing"
"""The reason with which a server that stops ends a stream."""
SHORT_METHODS = ("UpdatePriorities", "Delete", "ConsumeItems")
"""The methods that clients call on an open stream (the RPC `Multiplex`), because they call them often and the answers
are short. A token that may open the stream may call each of them."""

if "grpc" in sys.modules and "GRPC_EXPERIMENTS" not in os.environ:
    logging.getLogger(__name__).warning(
        "grpc was imported before replay_client, so its event engine is on, and each call takes up to a third longer; "
        "import replay_client first, or start the program with GRPC_EXPERIMENTS=%s",
        NO_EVENT_ENGINE,
    )
# If the user has set the variable, the user's value stays. Processes that this process starts inherit the variable.
os.environ.setdefault("GRPC_EXPERIMENTS", NO_EVENT_ENGINE)

__all__ = ["CLOSING", "NO_EVENT_ENGINE", "REASON_KEY", "SHORT_METHODS"]
