"""Rewrites of graphs, one file a pass; ``pipeline.py`` holds the one list of them."""
