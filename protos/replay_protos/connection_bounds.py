"""Connection bounds: how long, and on how many connections, an address of HTTP waits for requests.

Half a request costs its sender nothing. Without these bounds, anybody who reaches an address can use up all file
descriptors of its process. The process then accepts no connection, and cannot open its own files. Each web library has
its own implementation: aiohttp `replay_generator/rollouts/sessions/connections.py`, http.server
`replay_generator/policy/remote/serving.py`, uvicorn `replay_dashboard/guard.py`.
"""

from __future__ import annotations

import resource

SECONDS_PER_REQUEST = 10.0
"""Seconds from the first byte of a request, or from the connection, to its last byte. A handshake of TLS counts."""
SECONDS_IDLE = 75.0
"""Seconds from an answer to the next request of a connection, and for a client to read an answer that is ready."""
SECONDS_SAFE = 1.0
"""Seconds for which a new connection is not closed in favour of another, because its request is on the way."""
SECONDS_SILENT = 60.0
"""Seconds in which a client that fetches a large file has to read some of it. Otherwise the connection is closed."""
SECONDS_PER_PIECE = 60.0
"""Seconds in which a client that fetches a large file has to read BYTES_PER_PIECE of it. Otherwise its connection is
closed as soon as another connection needs the file descriptor."""
BYTES_PER_PIECE = 4 << 20
"""4 MiB in SECONDS_PER_PIECE are 70 kB/s. At that rate a model of a billion parameters takes eight hours."""
_SHARE = 4
"""One in this many file descriptors may be a connection."""
_MOST = 1 << 14


def most_connections() -> int:
    """Connections that may be open at an address. The other descriptors are for files and engines of the process."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return _MOST
    return max(1, min(files // _SHARE, _MOST))
