"""What is saved, read from a storage directory or through its daemon. Without torch: the command
line and the client's `Reader` both stand on it."""

VERSION = "0.1.0"
