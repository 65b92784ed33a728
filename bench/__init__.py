"""The load generator, `penstock bench`: sends requests to any server and measures its answers. Knows HTTP, and nothing inside a
server."""
