"""Served models: asked over OpenAI's protocol, for `headstart verify` and `headstart diagnose`."""
