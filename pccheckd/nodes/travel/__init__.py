"""Bytes between the nodes of a job: what this node lets others read, and what it reads there."""
