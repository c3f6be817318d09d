"""Training a draft for a target: the text it learns from, the training itself, and what it is worth.

``core.distill.synthesize`` lets the target write chats, ``core.distill.sources`` takes the user's own, and
``core.distill.corpus`` keeps both as ids and divides them into training and held-out.
"""
