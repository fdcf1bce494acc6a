"""What the daemon was started with: options, where values come from, what SIGHUP may change."""
