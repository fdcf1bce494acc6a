"""Whose checkpoints these are: job, rank, command, and the step that a call is for."""
