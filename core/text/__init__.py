"""Text: chat templates, turning ids into words, domains, the prompt suite, and what a terminal shows."""
