"""The wire: gRPC methods, messages, tokens and TLS."""
