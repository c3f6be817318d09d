"""How the page's handlers are connected: options that all its parts share. Knows no component."""

PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}
AT_ONCE = {**PRIVATE, "queue": False}  # answers while a reply streams
