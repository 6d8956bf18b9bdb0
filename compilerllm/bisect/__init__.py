"""Finds what makes a compiled model wrong: the pass, or the node, kernel and shape."""
