"""Planning of speculation on this machine: measured costs and acceptance -> the best drafter, depth and tree."""
