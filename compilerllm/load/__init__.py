"""Load on a server: what is asked, when, how long it took, and what to make of it."""
