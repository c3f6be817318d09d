"""The ways to draft by name, for whoever offers or shows them; imports nothing."""

# Everywhere a drafter is chosen or recorded: by name, in the order they are shown in.
DRAFTERS = {
    "model": "a small model",
    "eagle": "EAGLE: one layer over the target's features",
    "medusa": "Medusa: extra heads on the target",
    "early-exit": "early exit: the target's first layers",
    "ngram": "n-gram: repeats of the text so far",
    "recycling": "token recycling: the target's own likely successors",
    "auto": "n-gram where it matches, else the pair's own",
    "plain": "none: the target alone",
}
TREE_DRAFTERS = ("eagle", "medusa", "recycling", "auto")  # that make a tree where a tree is asked for


def title(name: str) -> str:
    """A drafter in a list of choices."""
    said = DRAFTERS[name]
    return said[0].upper() + said[1:]
