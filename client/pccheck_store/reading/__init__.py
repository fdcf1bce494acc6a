"""Reading one checkpoint, wherever it is."""
