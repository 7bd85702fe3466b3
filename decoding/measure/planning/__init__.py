"""Planning for this machine: measured costs and acceptance lead to the best drafter, depth and tree."""
