"""How operators watch the server: metrics, traces and log lines."""
