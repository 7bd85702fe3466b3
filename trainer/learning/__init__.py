"""The protocol of objectives, losses and their teachers, the Muon optimizer, and the timing of steps."""
