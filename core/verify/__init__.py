"""The rule: which drafted tokens stay, and what replaces the others. Pure functions of numbers."""
