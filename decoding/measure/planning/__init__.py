"""Planning for this machine: from measured costs and acceptance to the best drafter, depth and tree."""
