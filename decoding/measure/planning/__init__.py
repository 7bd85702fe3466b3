"""Planning for this machine: measured costs and acceptance -> the best drafter, depth and tree."""
