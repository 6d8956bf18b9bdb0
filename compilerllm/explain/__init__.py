"""What a build did and why: every kernel with its nodes, passes, choice, cost and time, as data, text and a page."""
