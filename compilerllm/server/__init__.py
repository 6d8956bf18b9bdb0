"""The OpenAI-compatible server: routes, request and response shapes, streaming, metrics."""
