"""The daemon: policy. Who may connect, what is admitted, in which state a checkpoint is, what is
recovered. Bytes are moved by pccheck_native."""

VERSION = "0.1.0"
