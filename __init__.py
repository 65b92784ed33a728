"""penstock: a server for large language models."""
