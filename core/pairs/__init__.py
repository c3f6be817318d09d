"""Pairs: a draft and a target that fit together, from what was asked for to what runs."""
