"""PCcheck for training scripts: several checkpoints in flight, durable, recoverable.

client = PCcheckClient()
client.attach(model=model, optimizer=optimizer, rng=True)
done = client.restore()
...
client.checkpoint(step=step)
"""

from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    DamagedError,
    DeviceError,
    NoCheckpointError,
    NoStoreError,
    PccheckError,
    ProtocolError,
    RefusedError,
    StateMismatchError,
    StorageFullError,
    StoreLockedError,
    UnreadableError,
    UnsupportedStateError,
    UsageError,
    WaitTimeoutError,
)
from pccheck_wire.messages import CheckpointState

from .checkpointer import PCcheckClient
from .handle import Checkpoint, Durable
from .restore import Found, RestoreResult
from .rng import capture_rng, restore_rng
from .version import __version__
from .warn import PccheckWarning

__all__ = [
    "Checkpoint",
    "CheckpointFailedError",
    "CheckpointState",
    "DaemonUnreachableError",
    "DamagedError",
    "DeviceError",
    "Durable",
    "Found",
    "NoCheckpointError",
    "NoStoreError",
    "PCcheckClient",
    "PccheckError",
    "PccheckWarning",
    "ProtocolError",
    "RefusedError",
    "RestoreResult",
    "StateMismatchError",
    "StorageFullError",
    "StoreLockedError",
    "UnreadableError",
    "UnsupportedStateError",
    "UsageError",
    "WaitTimeoutError",
    "__version__",
    "capture_rng",
    "restore_rng",
]
