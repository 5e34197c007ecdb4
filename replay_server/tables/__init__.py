"""Tables: the items that they hold, which item is drawn next, and which requests wait. Without gRPC and disk."""
