"""The router: it decides what flows, when, and what waits. It imports no torch."""
