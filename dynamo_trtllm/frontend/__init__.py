"""The HTTP side: OpenAI requests in, two legs over the plane, a token stream out. Knows no engine."""
