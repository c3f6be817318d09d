"""Models: where their weights come from, and in which form they run."""
