"""What operators see of a running server: metrics, traces and log lines."""
