"""Telemetry: the metrics, traces and log lines that operators see of a running server."""
