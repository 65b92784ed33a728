"""The router: serves HTTP, tokenizes, queues and schedules requests. It imports no torch."""
