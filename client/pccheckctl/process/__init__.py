"""Snapshots of whole processes."""
