"""The wire: the gRPC methods, and who may call them."""
