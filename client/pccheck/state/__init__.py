"""From a state to the layout of its payload: tree, extents, plan, and what changed since."""
