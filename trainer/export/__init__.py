"""Export of trained heads and drafts in the formats that servers load, with a model card; and their upload."""
