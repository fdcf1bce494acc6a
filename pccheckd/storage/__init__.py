"""The storage directory: locked, watched, and how much room it has."""
