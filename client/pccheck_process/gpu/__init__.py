"""Processes that use GPUs: NVIDIA's driver takes what they have on a GPU into their own memory
before CRIU comes, and brings it back. PCcheck asks the driver from outside."""

from .holding import HeldProcesses, held_now, hold, recover, refusals, wake
from .inspecting import inspect

__all__ = ["HeldProcesses", "held_now", "hold", "inspect", "recover", "refusals", "wake"]
