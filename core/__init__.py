"""Redline's engine. Knows torch; never imports gradio, plotly or anything of ``app``."""
