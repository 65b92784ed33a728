"""HTTP: JSON to requests and streams to JSON, nothing else."""
