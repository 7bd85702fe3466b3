"""Training of Medusa heads: Medusa-1, Medusa-2 and their job."""
