"""Proof that an engine, here or on a server, writes what its target would write (`headstart verify`)."""
