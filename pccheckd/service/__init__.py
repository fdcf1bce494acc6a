"""The service manager: descriptors at the start, READY, STATUS, WATCHDOG."""
