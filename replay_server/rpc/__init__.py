"""RPC: the gRPC methods of the server, their messages, tokens and TLS."""
