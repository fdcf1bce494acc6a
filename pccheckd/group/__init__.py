"""The ranks of one job: what they decide together, and why."""
