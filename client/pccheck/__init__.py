"""PCcheck for training scripts: several checkpoints in flight, durable, recoverable.

client = PCcheckClient()
client.attach(model=model, optimizer=optimizer, rng=True)
done = client.restore()
...
client.checkpoint(step=step)
"""

from pccheck_process.taken import ProcessSnapshot
from pccheck_store.jobs import Stored, StoredRank
from pccheck_store.reading.errors import RecycledError
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
from .flight.phases import Durable
from .process import snapshot
from .reader import Reader
from .restoring.begin import Saved
from .restoring.opened import OpenCheckpoint, TensorInfo, Wanted
from .restoring.reading import Found, RestoreResult
from .saving.handle import Checkpoint
from .state.attaching import Stateful
from .state.rng import capture_rng, restore_rng
from .state.shards import Shard
from .version import __version__
from .warn import PccheckWarning

__all__ = [
    "Checkpoint", "CheckpointFailedError", "CheckpointState", "DaemonUnreachableError",
    "DamagedError", "DeviceError", "Durable", "Found", "NoCheckpointError", "NoStoreError",
    "OpenCheckpoint", "PCcheckClient", "PccheckError", "PccheckWarning", "ProcessSnapshot",
    "ProtocolError", "Reader",
    "RecycledError", "RefusedError", "RestoreResult", "Saved", "Shard", "StateMismatchError",
    "Stateful", "StorageFullError", "StoreLockedError", "Stored", "StoredRank", "TensorInfo",
    "TornStateError", "UnreadableError", "UnsupportedStateError", "UsageError", "WaitTimeoutError",
    "Wanted", "__version__", "capture_rng", "restore_rng", "snapshot",
]  # fmt: skip
