"""Frameworks: a module or folder each, imported only by the scripts that use it."""
