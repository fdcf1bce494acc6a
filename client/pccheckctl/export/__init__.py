"""`pccheckctl recover` and `export`: checkpoints as files that other software reads."""
