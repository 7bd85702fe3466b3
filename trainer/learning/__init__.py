"""The objective protocol, losses with their teachers, the Muon optimizer and step timing."""
