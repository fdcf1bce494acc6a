"""Snapshots of processes that know nothing of checkpoints."""
