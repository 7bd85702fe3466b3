"""The commands of `headstart`, a file each."""
