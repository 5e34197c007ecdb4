"""Benchmarks: this server beside Reverb and TransferQueue, on one machine, in one run (`python -m benchmarks.run`)."""
