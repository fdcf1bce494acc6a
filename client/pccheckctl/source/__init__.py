"""Where checkpoints are read from: a running daemon, or a storage directory."""
