"""The embedded demo model: its weights, and the training data and scripts that made them."""
