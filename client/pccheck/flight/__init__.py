"""One save from its request to its end."""
