"""One rank of one job: its volumes, its channel, and its checkpoints from request to end."""
