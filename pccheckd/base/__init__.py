"""What every part of the daemon uses: tasks, threads, log lines, small files, access."""
