"""One job on several nodes: what its daemons tell each other, and what they keep of it."""
