"""A job on several nodes: values that pass between its daemons, through this process."""
