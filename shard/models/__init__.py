"""The decoder, and the model families as data that configures it."""
