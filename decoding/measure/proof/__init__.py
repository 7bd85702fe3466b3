"""Tests whether an engine, in this process or on a server, writes what its target would write (`headstart verify`)."""
