"""The launcher: plans, starts, watches and stops processes. It never touches a token."""
