"""What a checkpoint has of Hugging Face's Trainer itself: its counters, logs and metrics, the place
in the data, and the generators at moments before the checkpoint."""

from __future__ import annotations

from typing import Any

from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from pccheck.warn import warn

from .growing import GrowingLog, text_of


class Counters:
    """Attached like any other object with a state."""

    def __init__(self) -> None:
        self.state: Any = None
        self.trainer: Any = lambda: None
        self.text = ""  # of the checkpoint that was restored
        self.place: dict[str, Any] = {}  # likewise
        self._log = GrowingLog("log_history")
        self.rank = 0
        self.generators: dict[str, dict[str, Any]] = {}
        self._shape: list[int] = []
        self._passes = 0  # over the data, before the one of now
        self._began = 0  # the step at which this pass began
        self._is_inside = False

    def state_dict(self) -> dict[str, Any]:
        updates = self.state.global_step - self._began if self.state else 0
        place = {"passes": self._passes, "updates": updates, "shape": self._shape}
        return {
            "state": self._as_text(), "rank": self.rank, "generators": self.generators,
            "place": place,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.text, self.rank = text_of(state["state"]), state["rank"]
        self.generators, self.place = state["generators"], state["place"]

    def enter(self, args: Any, place: tuple[int, int]) -> None:
        """Training begins there: after so many passes over the data, and updates of the next."""
        self._shape = _shape(args)
        self._passes, self._began = place[0], self.state.global_step - place[1]
        self._is_inside = False

    def begin_pass(self) -> bool:
        """Whether training was in another pass before."""
        if self._is_inside:
            self._passes, self._began = self._passes + 1, self.state.global_step
        was_inside, self._is_inside = self._is_inside, True
        return was_inside

    def end(self, *, whole: bool) -> None:
        """Training has ended, perhaps in the middle of a pass; no step has begun since."""
        self.generators.pop("before on_step_begin", None)
        if whole and self._is_inside:
            self.begin_pass()
            self.generators = {}

    def place_for(self, args: Any) -> tuple[int, int] | None:
        """How many passes and updates of the next pass the checkpoint has had. Not what Trainer
        makes of `global_step`: Trainer does not know the length of a stream, nor of an epoch that
        was stopped. None, with a warning, when an update takes another number of rows now."""
        if self.place["shape"] == _shape(args):
            return self.place["passes"], self.place["updates"]
        warn(
            "another number of ranks, batch size or gradient_accumulation_steps than in the run "
            "that is resumed: Trainer finds its place in the data from global_step, so rows are "
            "left out or repeated in this epoch"
        )
        return None

    def _as_text(self) -> str | dict[str, Any]:
        """As Trainer writes it beside a checkpoint of its own; see `text_of`."""
        if self.state is None:
            return ""
        fields = dict(vars(self.state))
        trainer = self.trainer()
        if trainer is not None:
            every = [*trainer.callback_handler.callbacks, trainer.control]
            exported = TrainerState(
                stateful_callbacks=[one for one in every if isinstance(one, ExportableState)]
            )
            fields["stateful_callbacks"] = exported.stateful_callbacks
        return self._log.encoded(fields)


def _shape(args: Any) -> list[int]:
    """What an update takes from the data."""
    return [args.gradient_accumulation_steps, args.train_batch_size, args.world_size]
