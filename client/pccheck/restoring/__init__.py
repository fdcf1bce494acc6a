"""From a checkpoint to a state, in place or as a value."""
