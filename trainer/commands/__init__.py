"""The commands of `headstart`, one file each."""
