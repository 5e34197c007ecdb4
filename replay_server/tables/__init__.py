"""The meaning of tables: which items they hold, which is drawn next, and who waits. Knows neither gRPC nor the disk."""
