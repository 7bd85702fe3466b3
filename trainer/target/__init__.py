"""The frozen target: its hidden states and logits, online or stored."""
