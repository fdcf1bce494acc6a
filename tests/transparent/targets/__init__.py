"""Programs to be snapshotted: `python -m tests.transparent.targets.NAME LOG WORDS`. None knows of
snapshots, nor of PCcheck, except for client.py."""
