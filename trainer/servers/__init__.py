"""Served models, to which `headstart verify` and `headstart diagnose` send requests in OpenAI's protocol."""
