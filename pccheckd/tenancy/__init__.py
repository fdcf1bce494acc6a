"""One rank of one job: its volumes, its port, and its checkpoints from request to end."""
