"""Training of Medusa heads and distilled drafts, and their export. Imports decoding, never the reverse."""
