"""A look at a process before a snapshot: what the snapshot needs, and why it is refused."""

from .found import Attached, OpenFile, Refusal
from .look import Looked, look

__all__ = ["Attached", "Looked", "OpenFile", "Refusal", "look"]
