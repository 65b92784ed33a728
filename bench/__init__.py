"""Load from outside: what `penstock bench` asks of a server, and what it makes of the answers. Knows HTTP, no server's inside."""
