"""One checkpoint: its plan, the hand-over to the daemon, the gate, its end."""
