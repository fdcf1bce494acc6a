"""What a disk does with checkpoints, and what follows from that: `bench` and `tune`."""
