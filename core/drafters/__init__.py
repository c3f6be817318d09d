"""Ways to draft, one a file, behind one protocol (``core.drafters.base``)."""
