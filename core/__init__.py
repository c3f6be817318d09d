"""Redline's engine. Knows torch; never imports gradio, plotly or anything of ``app``."""

import os

# Before torch is imported. GNU OpenMP's threads wait for each other by spinning, for so long that a pass
# takes seconds once any other process wants a core, as a browser does; a short spin costs nothing when
# the machine is quiet (docs/LOG.md). Only libgomp reads it, and a value of the user's own stands.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
