"""The engine: draft, verify, commit, round by round until the reply ends."""
