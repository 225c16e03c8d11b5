"""A load client for servers that speak OpenAI's API."""
