"""Frameworks with PCcheck: their own trainers, killed and started again."""
