"""This machine: Redline's folder on it, what was found of it, its threads, and what is told meanwhile."""
