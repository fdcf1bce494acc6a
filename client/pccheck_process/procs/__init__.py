"""What /proc and the kernel say of processes, at one moment."""
