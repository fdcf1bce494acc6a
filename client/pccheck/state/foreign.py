"""Objects of the user's script: any method of theirs may raise anything, and must not end
training."""

from __future__ import annotations


def in_words(error: Exception) -> str:
    """An exception that such a method raised; its own __str__ is one of them."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
