"""Trees, distributions and acceptance rules: tensors only, never models."""
