"""What a run has and its checkpoints do not: for warnings."""
