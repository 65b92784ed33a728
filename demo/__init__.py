"""The embedded demo model: its weights, and the grammar and scripts that made them."""
