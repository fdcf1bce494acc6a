"""A process of one user that the daemon starts, confines, limits, watches and starts again."""
