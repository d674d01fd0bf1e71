"""Groups of ranks that restart in process: the product's calls, groups and monitors, on virtual threads."""
