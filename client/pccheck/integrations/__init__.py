"""Frameworks: one module each, imported only by the scripts that use it."""
