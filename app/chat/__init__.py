"""The chat: the conversation, its replies and tokens, and what is shown beside them."""
