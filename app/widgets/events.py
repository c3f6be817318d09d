"""What the handlers share: how they are connected and how often they look. Knows no component."""

PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}
AT_ONCE = {**PRIVATE, "queue": False}  # answers while a reply streams

TICK = 0.05  # seconds between looks at a reply in progress
SIGN_OF_LIFE_EVERY = 1.0  # a handler is told that its caller has gone only when it yields
