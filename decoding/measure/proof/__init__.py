"""Tests of an engine in this process or on a server: does it write what its target would write (`headstart verify`)?"""
