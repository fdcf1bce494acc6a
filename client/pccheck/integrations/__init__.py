"""PCcheck for frameworks: one module for each."""
