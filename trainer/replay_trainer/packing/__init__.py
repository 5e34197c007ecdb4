"""Packing: sequences in one row without padding, in which every shared prefix stands once."""
