"""What a model writes, taken apart while it comes: reasoning, answer, tool calls."""
