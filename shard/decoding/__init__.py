"""Decoding strategies, one a file."""
