"""CRIU: the program, its streams, and what passes through them."""
