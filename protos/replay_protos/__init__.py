"""The wire protocol: `replay.proto` and the code generated from it (`make protos`)."""
