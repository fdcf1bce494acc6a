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
    TornStateError,
    UnreadableError,
    UnsupportedStateError,
    UsageError,
    WaitTimeoutError,
)
from pccheck_wire.messages import CheckpointState

from .client import PCcheckClient
from .restoring.begin import Saved
from .restoring.reading import Found, RestoreResult
from .restoring.rebuild import Shard
from .saving.in_flight import Checkpoint, Durable
from .state.attaching import Stateful
from .state.rng import capture_rng, restore_rng
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
    "Saved",
    "Shard",
    "StateMismatchError",
    "Stateful",
    "StorageFullError",
    "StoreLockedError",
    "TornStateError",
    "UnreadableError",
    "UnsupportedStateError",
    "UsageError",
    "WaitTimeoutError",
    "__version__",
    "capture_rng",
    "restore_rng",
]
