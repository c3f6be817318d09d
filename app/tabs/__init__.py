"""The tabs beside the chat, a file a tab, and what they are made of."""
