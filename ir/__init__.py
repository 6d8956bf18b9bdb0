"""Graphs and nothing else: types, nodes, ops, text form, verifier. No torch here."""
