"""The decoder, and the families of models as data for it."""
