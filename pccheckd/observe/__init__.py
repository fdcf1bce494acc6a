"""What operators see: status, metrics, health."""
