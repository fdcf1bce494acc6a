"""What runs beside requests: checking for rot, expiry, files and GPUs that went, hung disks."""
