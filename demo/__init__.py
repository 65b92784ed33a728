"""The embedded demo model: its weights, and the lessons and scripts that made them."""
