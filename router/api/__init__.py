"""The router's HTTP APIs: JSON to requests, and streams of items to JSON. Nothing else."""
