"""Trees, distributions and acceptance rules. This package uses only tensors, and never a model."""
