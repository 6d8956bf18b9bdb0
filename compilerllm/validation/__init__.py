"""Held to account: every rewrite is run against the graph it replaced, on inputs made for the purpose."""
