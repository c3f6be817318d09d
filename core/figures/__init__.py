"""Figures: what rounds add up to, how sure that is, and what it costs."""
