"""Packing: sequences in one row without padding, in which every common beginning stands once."""
