"""ZeroMQ, in a process for each user."""
