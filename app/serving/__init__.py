"""Serving: options, start, loading a pair, ZeroGPU, and where the record lies."""
