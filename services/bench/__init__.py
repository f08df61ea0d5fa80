"""Speed, measured here and quoted as ratios; nothing in the tests depends on it."""
