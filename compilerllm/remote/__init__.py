"""A server of OpenAI's API seen from its clients: requests, streams, and a server of one's own for as long as it is needed."""
