"""Simulator: replays traces of requests against the router's own scheduler, with shards that only count: `python -m
penstock.simulator`.
"""
