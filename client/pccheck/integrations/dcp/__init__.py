"""torch.distributed.checkpoint on PCcheck.

    done = dcp.load(state, client=client)
    ...
    handle = dcp.async_save(state, client=client, step=step)

See docs/frameworks.md. Tested with torch 2.13.
"""

from .reading import PCcheckReader, load
from .saving import PCcheckWriter, async_save, save

__all__ = ["PCcheckReader", "PCcheckWriter", "async_save", "load", "save"]
