"""Requests: from the attach socket or a front to the one call that answers them."""
