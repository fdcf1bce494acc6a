"""An attached object with which a test acts in the middle of a call of the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Asking:
    """Its state_dict() and load_state_dict() call a function, once."""

    def __init__(self) -> None:
        self.asked: Callable[[], object] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        asked, self.asked = self.asked, lambda: None
        asked()
        return {"position": 5}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        self.state_dict()
