"""Verified bytes of this node's checkpoints for the other nodes of a job."""
